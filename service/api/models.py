"""Models: what a request may name, from MODELS and from the instances that are ready."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.auth import Caller
from service.api.context import Context, context_of
from service.api.errors import ApiError
from service.core.strictjson import printable
from service.store.instances import ready_boots

router = APIRouter(prefix="/v1/models")


@router.get("")
def list_models(request: Request, tenant: Caller) -> Response:
    return json_answer({"object": "list", "data": list(_models(context_of(request)).values())})


@router.get("/{name:path}")
def get_model(name: str, request: Request, tenant: Caller) -> Response:
    found = _models(context_of(request)).get(name)
    if found is None:
        raise ApiError(404, "model_not_found", f"The model '{printable(name)}' is not served.", param="model")
    return json_answer(found)


def _models(context: Context) -> dict[str, dict[str, Any]]:
    """A listed model is there with no instance up: its jobs wait. `instances` says how many serve it now."""
    with context.database.transaction() as conn:
        boots = ready_boots(conn, context.settings.stale_boot_seconds)
    ready = Counter(boot.model for boot in boots)
    listed = {name: model.name for name in context.models.names() if (model := context.models.resolve(name))}
    found = {boot.model: boot.model for boot in boots} | listed
    return {name: _model_object(name, root, ready[root]) for name, root in sorted(found.items())}


def _model_object(name: str, root: str, instances: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,  # nothing knows
        "owned_by": "trunkline",
        "root": root,
        "instances": instances,
    }
