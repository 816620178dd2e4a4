"""Why a request is refused, in the forms that clients of either API read."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A request that gets no answer.

    Attributes:
        status: of HTTP.
        param: the field that is at fault.
        code: a word for programs.
        retry_after: seconds after which another attempt may succeed.
        close: whether the connection is of no further use.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after, self.close = retry_after, close

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        if self.close:
            found["Connection"] = "close"
        return found

    def body(self, path: str) -> dict[str, Any]:
        """Megatron's form for ``/api``, OpenAI's for all other paths."""
        return {"message": self.message} if path == "/api" else self.openai()

    def openai(self) -> dict[str, Any]:
        """OpenAI's form, which also ends a stream."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _TYPES[400])
        named = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": kind, **named}}
