"""What reaches the engine of what clients send: each tenant's own salt and none of a client's server-owned fields,
whichever way a request came; and the SDK's calls of the engine's endpoints, with both clients."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import sqlalchemy as sa
from api_fixtures import Api
from both_sdks import KINDS, Sdk, sdk_of
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request
from line_fixtures import Line, line, whole_line  # noqa: F401 - fixtures
from stream_script import HELLO, Script
from worker_processes import wait_until

from service.core.batchfile import SERVER_OWNED_KEYS
from service.core.model import Endpoint
from service.fleet import load_models
from service.store import tenants
from service.store.tables import job
from service.tokenizing import Tokenizing

pytestmark = pytest.mark.embedded_only

CHAT, TEXT, EMBED = Endpoint.CHAT.value, Endpoint.COMPLETIONS.value, Endpoint.EMBEDDINGS.value
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"prompt": "hello"},
    EMBED: {"input": "hello"},
}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
ANSWERS: dict[str, dict[str, Any]] = {
    CHAT: {
        "id": "x", "object": "chat.completion", "created": 1, "model": "tiny", "usage": USAGE,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": '{"n": 1}'}}],
    },
    TEXT: {
        "id": "x", "object": "text_completion", "created": 1, "model": "tiny", "usage": USAGE,
        "choices": [{"index": 0, "text": "hi", "finish_reason": "stop", "logprobs": None}],
    },
    EMBED: {
        "object": "list", "model": "tiny", "usage": {"prompt_tokens": 1, "total_tokens": 1},
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
    },
}  # fmt: skip
# Legal as values where the contract judges the field, and unlike anything that the server sends.
SMUGGLED = {name: f"smuggled-{name}" for name in sorted(SERVER_OWNED_KEYS - {"stream"})}
WAYS = ("batch", "job", "transparent", "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A tenant with its salt as the engine is told it."""

    key: str
    salt: str
    desk: Desk


def owner(api: Api) -> Owner:
    name = f"tenant-{secrets.token_hex(6)}"
    key = api.make_key(name)
    with api.database.transaction() as conn:
        found = tenants.ensure_tenant(conn, name)
    desk = api.desk(name)
    models = load_models(api.settings.models_path)  # the desk of the fixtures knows others
    work = replace(desk.work, models=models, tokenizing=Tokenizing(models))
    return Owner(key=key, salt=found.salt.hex(), desk=replace(desk, work=work))


@pytest.fixture(scope="module")
def ours(whole_line: Line) -> Owner:
    return owner(whole_line.api)


@pytest.fixture(scope="module")
def theirs(whole_line: Line) -> Owner:
    return owner(whole_line.api)


def send(line: Line, who: Owner, way: str, endpoint: str, body: dict[str, Any]) -> None:
    """One request, in one of the ways that there are, until it is answered."""
    line.engine.reply = (200, json.dumps(ANSWERS[endpoint]).encode())
    with line.api.as_tenant(who.key) as http:
        http.timeout = 60
        if way == "transparent":
            assert http.post(endpoint, json=body).status_code == 200
        elif way == "stream":
            line.engine.script = Script(HELLO)
            assert http.post(endpoint, json={**body, "stream": True}).text.endswith("data: [DONE]\n\n")
        elif way == "job":
            made = http.post("/v1/jobs?wait=50", json={"endpoint": endpoint, "body": body})
            assert (made.status_code, made.json()["status"]) == (202, "succeeded"), made.text
        else:
            row = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
            file_id = line.api.upload(jsonl([row]), http)
            batch_id = line.api.create(file_id, http, endpoint=endpoint)["id"]
            run_open_tasks(who.desk)
            url = f"/v1/batches/{batch_id}"
            assert http.get(url).json()["status"] == "in_progress", http.get(url).json()["errors"]
            wait_until(lambda: http.get(f"{url}/results").text != "", 50, lambda: line.logs())


@pytest.mark.parametrize("way", WAYS)
def test_the_salt_is_the_tenants_own_also_when_it_sends_anothers(
    line: Line, ours: Owner, theirs: Owner, way: str
) -> None:
    """The same prompt of both, the second with the first one's salt: the engine sees two salts, so it shares nothing,
    and the plan sees two keys, so it expects nothing."""
    prompt = {"messages": [{"role": "user", "content": f"{way} " + "shared words " * 60}]}
    send(line, ours, way, CHAT, {"model": "tiny", **prompt})
    for spelling in ({"cache_salt": ours.salt}, {"cache_salt": ours.salt, "extra_body": {"cache_salt": ours.salt}}):
        send(line, theirs, way, CHAT, {"model": "tiny", **prompt, **spelling})
    (_, first), *others = line.engine.asked
    assert first["cache_salt"] == ours.salt
    assert [body["cache_salt"] for _, body in others] == [theirs.salt, theirs.salt]
    assert ours.salt != theirs.salt
    with line.api.database.transaction() as conn:
        newest = sa.select(job.c.prefix_key).order_by(job.c.id.desc()).limit(3)
        second, again, of_ours = conn.execute(newest).scalars()
    assert of_ours[:4] != second[:4]
    assert second[:4] == again[:4]


@pytest.mark.parametrize(
    ("way", "endpoint"),
    [(way, item) for way in WAYS for item in Endpoint if (way, item) != ("stream", Endpoint.EMBEDDINGS)],
)
def test_fields_that_are_the_servers_never_reach_the_engine(
    line: Line, ours: Owner, way: str, endpoint: Endpoint
) -> None:
    """All of them in one body, of which everything else arrives as it was sent."""
    smuggled = {**SMUGGLED, "stream": False}
    if way == "stream":
        smuggled["stream_options"] = {"include_usage": True}
    sent = {"model": "tiny", **PROMPTS[endpoint], "user": "\u2028é", "temperature": 0.5, "unknown": {"a": [1, None]}}
    send(line, ours, way, endpoint, {**sent, **smuggled})
    ((path, body),) = line.engine.asked
    assert path == endpoint
    assert body.pop("cache_salt") == ours.salt
    assert isinstance(body.pop("priority", 0), int)
    if way == "stream":
        assert (body.pop("stream"), body.pop("stream_options")["include_usage"]) == (True, True)
    assert body == sent


@pytest.fixture(params=KINDS)
def sdk(request: pytest.FixtureRequest, line: Line, ours: Owner) -> Iterator[Sdk]:
    with sdk_of(request.param, line.api.url, ours.key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("chat.completions.create", CHAT),
        ("chat.completions.parse", CHAT),
        ("completions.create", TEXT),
        ("embeddings.create", EMBED),
    ],
)
def test_every_call_of_the_engines_endpoints(line: Line, sdk: Sdk, name: str, endpoint: str) -> None:
    line.engine.reply = (200, json.dumps(ANSWERS[endpoint]).encode())
    answer = sdk.call(name, model="tiny", **PROMPTS[endpoint])
    assert answer.to_dict(mode="json", exclude_unset=True)["usage"] == ANSWERS[endpoint]["usage"]
    assert answer._request_id.startswith("req_") if hasattr(answer, "_request_id") else True
    assert [path for path, _ in line.engine.asked] == [endpoint]
    unknown = sdk.refused(name, model="none", **PROMPTS[endpoint])
    assert (unknown.status_code, unknown.code, unknown.param) == (404, "model_not_found", "model")
    line.engine.reply = (400, b'{"object": "error", "message": "too long", "code": 400, "type": "BadRequestError"}')
    refused = sdk.refused(name, model="tiny", **PROMPTS[endpoint])
    assert (refused.status_code, refused.code, refused.type) == (400, None, "invalid_request_error")
    assert "too long" in refused.message


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_a_batch_of_each_endpoint(line: Line, sdk: Sdk, ours: Owner, endpoint: Endpoint) -> None:
    """From file to file with the SDK; a line for another endpoint is refused."""
    line.engine.reply = (200, json.dumps(ANSWERS[endpoint]).encode())
    rows = [request(f"c{n}", url=endpoint.value, body={"model": "tiny", **PROMPTS[endpoint]}) for n in range(2)]
    source = sdk.call("files.create", file=("in.jsonl", jsonl(rows)), purpose="batch")
    fields = {"input_file_id": source.id, "completion_window": "24h"}
    made = sdk.call("batches.create", endpoint=endpoint, **fields)
    run_open_tasks(ours.desk)

    def has_ended() -> bool:
        ours.desk.finalize()
        run_open_tasks(ours.desk)
        return bool(sdk.call("batches.retrieve", made.id).status == "completed")

    wait_until(has_ended, 60, lambda: line.logs())
    ended = sdk.call("batches.retrieve", made.id)
    lines = [json.loads(text) for text in sdk.call("files.content", ended.output_file_id).iter_lines()]
    assert {item["custom_id"] for item in lines} == {"c0", "c1"}
    assert all(item["response"]["body"] == ANSWERS[endpoint] for item in lines)
    other = next(item for item in Endpoint if item is not endpoint)
    wrong = sdk.call("batches.create", endpoint=other, **fields)
    run_open_tasks(ours.desk)
    errors = sdk.call("batches.retrieve", wrong.id).errors.data
    assert [(error.code, error.param, error.line) for error in errors] == [
        ("invalid_url", "url", 1),
        ("invalid_url", "url", 2),
    ]
