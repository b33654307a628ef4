"""The error envelope: every answer that is not 2xx has it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from service.api.answers import json_answer
from service.core.resultline import error_type
from service.errors import DatabaseUnreachable, ModelMissing, StoreFailed
from service.store.idempotency import IdempotencyConflict

log = logging.getLogger(__name__)

# The SDK repeats 408, 409, 429 and every 5xx; a repeated 409 can never succeed.
DO_NOT_RETRY = {"x-should-retry": "false"}

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(Exception):
    """A request is refused: status, code, message and the parameter at fault, as the contract has them."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})


def invalid_value(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def invalid_type(param: str | None, message: str) -> ApiError:
    return ApiError(400, "invalid_type", message, param=param)


def missing(param: str) -> ApiError:
    return ApiError(400, "missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)


def not_found(param: str) -> ApiError:
    """One wording for what is not there and for what is another tenant's."""
    noun = param.removesuffix("_id").replace("_", " ")
    return ApiError(404, "not_found", f"There is no such {noun}.", param=param)


def envelope(status: int, code: str | None, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def error_answer(error: ApiError) -> Response:
    headers = {**(DO_NOT_RETRY if error.status == 409 else {}), **error.headers}
    return json_answer(envelope(error.status, error.code, error.message, error.param), error.status, headers)


def internal_error() -> Response:
    return error_answer(ApiError(500, "internal_error", "The server failed; the log has the cause by x-request-id."))


def install(app: FastAPI) -> None:
    """Translate every exception that a route may raise. What is left is caught by `RequestScope`."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(IdempotencyConflict, _idempotency_conflict)
    for kind in (
        DatabaseUnreachable,
        StoreFailed,
        ModelMissing,
        sa.exc.OperationalError,
        sa.exc.InterfaceError,
        sa.exc.TimeoutError,
    ):
        app.add_exception_handler(kind, _unavailable)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"Unknown URL: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed here.",
    }
    return error_answer(
        ApiError(
            error.status_code,
            _CODES.get(error.status_code, "invalid_request"),
            messages.get(error.status_code, str(error.detail)),
            headers={"allow": _allowed(request)} if error.status_code == 405 else error.headers,
        )
    )


def _allowed(request: Request) -> str:
    """Every method of the path: the exception names those of the first route that has it."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for methods in fitting for method in methods}))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first.get("loc", ())]
    return error_answer(ApiError(400, "invalid_value", str(first.get("msg", "")), param=place[-1] if place else None))


async def _idempotency_conflict(request: Request, error: Exception) -> Response:
    return error_answer(ApiError(409, "idempotency_conflict", str(error), param="Idempotency-Key"))


async def _unavailable(request: Request, error: Exception) -> Response:
    """Nothing was written: a create is one transaction."""
    # The class and no message: a driver's message can hold values of a row.
    log.error("request_id=%s unavailable: %s", request.state.request_id, type(error).__name__)
    message = "A part of the server (database, file store or model files) does not answer; try again."
    return error_answer(ApiError(503, "service_unavailable", message, headers={"retry-after": "5"}))
