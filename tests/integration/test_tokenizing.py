"""Tokenizing: our token ids against those of transformers, run apart because its import takes long and pulls torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from service.core import prefix
from service.core.model import Endpoint
from service.errors import ModelMissing
from service.fleet import Model, Models
from service.tokenizing import KeyRequest, Tokenizing

CHAT, COMPLETIONS, EMBEDDINGS = (endpoint.value for endpoint in Endpoint)

TEMPLATE = """{{ bos_token }}{%- if tools %}<|im_start|>tools
{%- for tool in tools %}
{{ tool | tojson(indent=2) }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{% continue %}{% endif %}
    <|im_start|>{{ message['role'] }}
    {%- if message.role == 'assistant' %}{% generation %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{% endgeneration %}{%- else %}
{{ message['content'] }}
    {%- endif %}<|im_end|>
{% endfor %}
{%- if not messages[0].role %}{{ raise_exception('no role') }}{% endif %}
{%- if style is defined %}style={{ style }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LIST_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{{ part.type }}:{{
part.text | trim }};{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS = [
    {
        "function": {
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Ville <é>"}}},
            "name": "weather",
        },
        "type": "function",
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [user("Hello, how are you?")]},
    "system": {"messages": [{"role": "system", "content": "You are terse."}, user("Name one\n\ncolour.  ")]},
    "empty system": {"messages": [{"role": "system", "content": ""}, user("x")]},
    "turns": {
        "messages": [user("Hi"), {"role": "assistant", "content": "Hello!\n"}, user("<|im_end|> & <b>bye</b>")],
    },
    "unicode": {"messages": [user("naïve 你好 🤖\u2028 e\u0301 \u0000 end\t")]},
    "tools": {"messages": [user("Weather?")], "tools": TOOLS},
    "tool call": {
        "messages": [
            user("Weather?"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "tools": TOOLS,
    },
    "documents": {"messages": [user("Sum up")], "documents": [{"title": "A", "text": "long text"}]},
    "kwargs": {"messages": [user("Hi")], "chat_template_kwargs": {"style": "plain", "unknown": 1}},
    "no prompt": {"messages": [user("Hi")], "add_generation_prompt": False},
    "continued": {
        "messages": [user("Hi"), {"role": "assistant", "content": "The answer is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}

# Run with the folder and the bodies; the messages are as vLLM hands them to transformers (see service/messages.py).
REFERENCE = """
import json, sys
from transformers import AutoTokenizer
folder, bodies = sys.argv[1], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder)
found = {}
for name, body in bodies.items():
    for message in body["messages"]:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    for tool in body.get("tools") or ():
        given = tool.pop("function")
        tool["function"] = {key: given.get(key) for key in ("name", "description", "parameters")}
    found[name] = tokenizer.apply_chat_template(
        body["messages"], tools=body.get("tools"), documents=body.get("documents"), return_dict=False,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False), **body.get("chat_template_kwargs", {}),
    )
found["completion"] = tokenizer("Once upon a time").input_ids
found["completion, bare"] = tokenizer("Once upon a time", add_special_tokens=False).input_ids
json.dump(found, sys.stdout)
"""


def build_tokenizer(folder: Path, template: Any, *, in_config: bool = False) -> Path:
    """A small byte-level BPE model folder, trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEMPLATE, json.dumps(CONVERSATIONS), "system user assistant tool hello"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(5)  # some published files have it; it must not apply
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
    }
    if in_config:
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("models") / "tiny model", TEMPLATE)


def tokenizing(folder: Path | None, **model: Any) -> Tokenizing:
    return Tokenizing(Models({"tiny": Model(name="tiny", tokenizer=folder, **model)}), default_output_tokens=99)


def ids(folder: Path, body: dict[str, Any], endpoint: str = CHAT) -> list[int] | None:
    return tokenizing(folder).token_ids("tiny", endpoint, body)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, list[int]]:
    """Transformers' own answer to every conversation."""
    pytest.importorskip("transformers", reason="transformers comes with the extra [cpu]")
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(folder)],
        input=json.dumps(CONVERSATIONS),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_token_ids_are_those_of_transformers(folder: Path, reference: dict[str, list[int]], name: str) -> None:
    ours = ids(folder, CONVERSATIONS[name])
    assert ours == reference[name]
    assert len(ours) > 5


def test_completions_get_the_special_tokens_that_transformers_adds(
    folder: Path, reference: dict[str, list[int]]
) -> None:
    body = {"prompt": "Once upon a time"}
    assert ids(folder, body, COMPLETIONS) == reference["completion"]
    assert ids(folder, {**body, "add_special_tokens": False}, COMPLETIONS) == reference["completion, bare"]
    assert len(reference["completion"]) == len(reference["completion, bare"]) + 1


def test_parts_of_text_are_joined_by_line_ends(folder: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ids(folder, {"messages": [user(parts)]}) == ids(folder, {"messages": [user("one\ntwo")]})
    assert ids(folder, {"messages": [user(None)]}) == ids(folder, {"messages": [user("")]})


def test_a_template_that_loops_over_content_is_given_parts(tmp_path: Path) -> None:
    folder = build_tokenizer(tmp_path / "m", LIST_TEMPLATE)
    tokens = ids(folder, {"messages": [user(" one ")]})
    assert tokens is not None
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\ntext:one;<|im_end|>\n<|im_start|>assistant\n"


def test_named_templates_in_the_config_and_beside_it(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    in_config = build_tokenizer(tmp_path / "a", named, in_config=True)
    beside = build_tokenizer(tmp_path / "b", "plain")
    (beside / "chat_templates").mkdir()
    (beside / "chat_templates" / "tool_use.jinja").write_text("with tools")
    for folder in (in_config, beside):
        body = {"messages": [user("x")]}
        assert ids(folder, body) == ids(folder, {"prompt": "plain", "add_special_tokens": False}, COMPLETIONS)
        with_tools = ids(folder, {**body, "tools": TOOLS})
        assert with_tools == ids(folder, {"prompt": "with tools", "add_special_tokens": False}, COMPLETIONS)


def test_developer_messages_become_system_ones(folder: Path) -> None:
    developer = {"messages": [user("Hi"), {"role": "developer", "content": "Be brief."}]}
    system = {"messages": [{"role": "system", "content": "Be brief."}, user("Hi")]}
    assert ids(folder, developer) == ids(folder, system)


def test_prompts_of_completions_and_embeddings(folder: Path) -> None:
    keys = tokenizing(folder)
    text = "words and words " * 40
    one = keys.key("tiny", COMPLETIONS, {"prompt": text, "max_tokens": 3}, b"s")
    two = keys.key("tiny", COMPLETIONS, {"prompt": [text, "more"]}, b"s")
    tokens = ids(folder, {"prompt": text}, COMPLETIONS)
    given = keys.key("tiny", COMPLETIONS, {"prompt": tokens}, b"s")
    several = keys.key("tiny", COMPLETIONS, {"prompt": [tokens, [1, 2, 3]]}, b"s")
    assert tokens is not None
    assert one.prefix_key == two.prefix_key == given.prefix_key == several.prefix_key != b""
    assert one.prompt_tokens == given.prompt_tokens == several.prompt_tokens - 3 == len(tokens)
    assert two.prompt_tokens > one.prompt_tokens
    assert (one.output_tokens, two.output_tokens) == (3, 99)
    embedding = keys.key("tiny", EMBEDDINGS, {"input": text}, b"s")
    assert (embedding.prefix_key, embedding.output_tokens) == (one.prefix_key, 0)
    cut = keys.key("tiny", COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 40}, b"s")
    assert cut.prompt_tokens == 40


def test_the_batch_form_agrees_with_the_single_one(folder: Path) -> None:
    keys = tokenizing(folder)
    bodies: list[tuple[str, dict[str, Any]]] = [(CHAT, body) for body in CONVERSATIONS.values()]
    bodies += [(COMPLETIONS, {"prompt": "x" * 300}), (CHAT, {"messages": "not a list"}), (EMBEDDINGS, {"input": []})]
    requests = [KeyRequest(model="tiny", endpoint=endpoint, body=body, salt=b"s") for endpoint, body in bodies]
    assert keys.keys(requests) == [keys.key("tiny", endpoint, body, b"s") for endpoint, body in bodies]


def test_keys_part_tenants_models_revisions_and_adapters(folder: Path) -> None:
    body = {"messages": [user("the same words " * 40)]}
    keys = tokenizing(folder, aliases=("small",), adapters=("tiny-legal",))
    plain = keys.key("tiny", CHAT, body, b"a")
    assert plain == keys.key("small", CHAT, body, b"a")
    others = [
        keys.key("tiny", CHAT, body, b"b"),
        keys.key("tiny-legal", CHAT, body, b"a"),
        tokenizing(folder, revision="2").key("tiny", CHAT, body, b"a"),
    ]
    assert len({plain.prefix_key[:4], *(other.prefix_key[:4] for other in others)}) == 4
    assert {other.prompt_tokens for other in others} == {plain.prompt_tokens}


def test_requests_that_begin_alike_share_a_key_prefix(folder: Path) -> None:
    system = {"role": "system", "content": "instructions that everybody gets " * 30}
    keys = tokenizing(folder)
    first, second = (keys.key("tiny", CHAT, {"messages": [system, user(text)]}, b"s") for text in ("one", "two"))
    assert first.prompt_tokens - prefix.shared_tokens(first.prefix_key, second.prefix_key) < 48


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user([{"type": "image_url", "image_url": {"url": "data:,"}}])]},
        {"messages": [{"content": "no role"}]},
        {"messages": [user("half \ud800 a pair")]},
        {"messages": [user("x")], "tools": []},
        {"messages": [user("x")], "tools": ["no object"]},
        {"messages": [user("x")], "chat_template": "mine"},
        {"messages": [user("x")], "chat_template_kwargs": {"chat_template": "mine"}},
        {"messages": [user("x")], "continue_final_message": True},
        {"messages": []},
        {"messages": 5},
    ],
)
def test_what_the_template_refuses_is_keyed_by_bytes(folder: Path, body: dict[str, Any]) -> None:
    keyed = tokenizing(folder).key("tiny", CHAT, body, b"s")
    assert keyed.kind == "bytes"
    assert keyed.prompt_tokens >= 0


def test_without_a_tokenizer_bytes_still_group_what_begins_alike() -> None:
    keys = tokenizing(None)
    system = {"role": "system", "content": "instructions " * 100}
    first, second = (keys.key("tiny", CHAT, {"messages": [system, user(text)]}, b"s") for text in ("one", "two"))
    assert first.kind == "bytes"
    assert prefix.shared_tokens(first.prefix_key, second.prefix_key) >= 300
    assert first.prompt_tokens > 300


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelMissing, match="tiny"):
        tokenizing(tmp_path).key("tiny", CHAT, {"messages": [user("x")]}, b"s")


def test_a_limit_far_above_the_default_is_no_prediction() -> None:
    keys = tokenizing(None)
    for limit, predicted in ((0, 0), (396, 396), (397, 396), (2**40, 396), (-1, 99), (True, 99), (None, 99)):
        body = {"messages": [user("x")], "max_tokens": limit}
        assert keys.key("tiny", CHAT, body, b"s").output_tokens == predicted
