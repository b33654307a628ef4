"""One tree of errors for producers: by what went wrong, each message saying what to do where that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trunkline.wire import Batch, Job

_SHOWN_LINE_ERRORS = 5  # in a message; `BatchFailed.errors` has them all


class TrunklineError(Exception):
    """Everything that this package raises on purpose."""

    exit_status = 1  # of the command line


class ConfigError(TrunklineError):
    """The address or the key cannot be used."""

    exit_status = 2


class InputError(TrunklineError):
    """What was to be sent is no batch or no job; nothing was sent."""

    exit_status = 2


class ConnectionFailed(TrunklineError):
    """The server could not be reached, or went away before it answered."""

    def __init__(self, base_url: str, cause: str) -> None:
        self.base_url = base_url
        super().__init__(f"No answer from {base_url}: {cause}. Is the server up, and is TRUNKLINE_BASE_URL right?")


class UnreadableReply(TrunklineError):
    """The answer is not what the contract says: probably no Trunkline server, or a proxy before it."""


class TimedOut(TrunklineError):
    """The time given to a wait is over. The batch or job goes on; wait for it again by its id."""

    exit_status = 4


class APIError(TrunklineError):
    """The server refused a request. `status_code`, `code`, `param` and `request_id` are the envelope's."""

    hint = ""

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        self.message = message
        self.status_code = status_code
        self.code = code
        self.param = param
        self.request_id = request_id
        place = f", {param}" if param else ""
        request = f", request {request_id}" if request_id else ""
        text = f"{message} ({status_code} {code or 'no code'}{place}{request})"
        super().__init__(f"{text} {self.hint}".strip())


class InvalidRequestError(APIError):
    """400, 405, 413, 416, 422: the request itself is wrong, `param` says where."""


class AuthenticationError(APIError):
    """401: no key, or not a key of this server."""

    hint = "Set TRUNKLINE_API_KEY, or pass api_key."


class PermissionDenied(APIError):
    """403: the key may not do this."""


class NotFoundError(APIError):
    """404: no such thing for this key; ids of other tenants are not found either."""


class ConflictError(APIError):
    """409: not in this state, or an idempotency key used for something else."""


class QuotaError(APIError):
    """429: too much is queued or asked at once; `retry_after_seconds` where the server said when to try again."""

    retry_after_seconds: float | None = None


class ServerError(APIError):
    """5xx, or 408: the server failed, after this client's own retries."""


class BatchFailed(TrunklineError):
    """The batch ended as `failed`: nothing of it was run. `batch` is its last state, `errors` its line errors."""

    exit_status = 3

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.errors = batch.line_errors
        shown = [str(error) for error in self.errors[:_SHOWN_LINE_ERRORS]]
        if len(self.errors) > len(shown):
            shown.append(f"and {len(self.errors) - len(shown)} more errors")
        super().__init__("; ".join([f"Batch {batch.id} failed", *shown]) + ".")


class JobFailed(TrunklineError):
    """The job ended without a good answer: `job.status` is failed, cancelled or expired."""

    exit_status = 3

    def __init__(self, job: Job) -> None:
        self.job = job
        reason = f": {job.failure.message}" if job.failure else ""
        super().__init__(f"Job {job.id} ended as {job.status}{reason}")


def api_error(
    status_code: int,
    *,
    message: str,
    code: str | None,
    param: str | None,
    request_id: str | None,
    retry_after_seconds: float | None,
) -> APIError:
    """The error class that goes with a status."""
    kind = _KINDS.get(status_code, ServerError if status_code >= 500 else InvalidRequestError)
    error = kind(message, status_code=status_code, code=code, param=param, request_id=request_id)
    if isinstance(error, QuotaError):
        error.retry_after_seconds = retry_after_seconds
    return error


_KINDS: dict[int, type[APIError]] = {
    401: AuthenticationError,
    403: PermissionDenied,
    404: NotFoundError,
    408: ServerError,
    409: ConflictError,
    429: QuotaError,
}
