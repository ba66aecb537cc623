"""Errors of the API in OpenAI's form: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from whet.errors import ConfigError, DataError, EngineError, format_exception, format_value
from whet.serve.engine_loop import ClosedError

__all__ = ["ApiError", "to_api_error"]


class ApiError(Exception):
    """An error that a client receives.

    Args: status: of HTTP. message: the value, the rule and the fix. param: the field of the body. code: OpenAI's code.

    >>> ApiError(404, "no such route").body()["error"]["type"]
    'invalid_request_error'
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Returns the body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def to_api_error(error: Exception) -> ApiError:
    """Returns the ApiError of any error: 400 for what the client asked for, 500 for what failed here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _validation_error(error)
    if isinstance(error, ConfigError | DataError):
        return ApiError(400, str(error).removeprefix("row 0: "))
    if isinstance(error, ClosedError):
        return ApiError(503, str(error))
    return ApiError(500, str(error) if isinstance(error, EngineError) else format_exception(error))


def _validation_error(error: ValidationError) -> ApiError:
    """Returns the first problem that pydantic found in a body."""
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {path!r}: this server has no such option; leave it out", param=path)
    if problem["type"] == "missing":
        return ApiError(400, f"the parameter {path!r} is missing; add it to the body", param=path)
    reason = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{path}={format_value(problem['input'], 60)}: {reason}", param=path)
