"""The OpenAPI document against the routes, and against what the API answers to what schemathesis makes of it."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import schemathesis
from api_fixtures import Api, steady  # noqa: F401
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi import checks
from seeds import MODEL

from service.api import app as application
from service.api.openapi.document import document

pytestmark = pytest.mark.embedded_only

# Every answer is one that the document names, of the type and the shape it says, and no 5xx.
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
_WITHOUT_ENGINE = r"^(?!/v1/(chat/completions|completions|embeddings)$)"

schema = schemathesis.openapi.from_dict(document()).include(path_regex=_WITHOUT_ENGINE)


_turns = itertools.count()


def make_real(case: schemathesis.Case, api: Api) -> None:
    """Every other time: ids of what is there, which nothing makes up by chance."""
    if case.query.get("wait"):
        case.query["wait"] = 0  # no job ever ends: nobody works here
    if next(_turns) % 2:
        return
    makers = {"file_id": api.upload, "batch_id": lambda: api.create()["id"], "job_id": lambda: _job(api)}
    for name in set(case.path_parameters) & set(makers):
        case.path_parameters[name] = makers[name]()
    if isinstance(case.body, dict) and "input_file_id" in case.body:
        case.body["input_file_id"] = api.upload()


def _job(api: Api) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    made = api.http.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
    assert made.status_code == 202, made.text
    return str(made.json()["id"])


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
def test_every_answer_is_as_documented(case: schemathesis.Case, steady: Api) -> None:
    make_real(case, steady)
    case.call_and_validate(base_url=steady.url, checks=CHECKS)


def test_the_document_names_every_route_and_no_other(steady: Api) -> None:
    served = steady.http.get("/openapi.json")
    assert served.json() == json.loads(json.dumps(document()))
    named = {(path, method) for path, item in document()["paths"].items() for method in item}
    routes = {
        (re.sub(r":path\}", "}", route.path), method.lower())
        for part in application.PARTS
        for route in part.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert named == routes
