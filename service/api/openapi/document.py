"""The document as it is served at /openapi.json. Open: it holds nothing that docs/api.md does not."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.openapi.paths import PATHS
from service.api.openapi.schemas import SCHEMAS

router = APIRouter()

_TAGS = {
    "Files": "Input files of batches, and the files that batches write.",
    "Batches": "Sets of requests, as OpenAI's Batch API has them, and what Trunkline adds.",
    "Jobs": "Single requests: submit and poll.",
    "Inference": "The engine's own endpoints, placed where the prefix is warm.",
    "Models": "What a request may name.",
    "Health": "For load balancers, monitoring and tools.",
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Trunkline",
            "version": version("trunkline"),
            "description": "Batch inference on your own engines, prefix by prefix.",
        },
        "security": [{"key": []}],
        "tags": [{"name": name, "description": says} for name, says in _TAGS.items()],
        "paths": PATHS,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
    }


@router.get("/openapi.json")
def openapi() -> Response:
    return json_answer(document())
