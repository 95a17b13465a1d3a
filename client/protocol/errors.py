"""Errors that cross the wire: one type with a stable code, an HTTP status and a retry rule per code."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Retry = Literal["never", "same", "after", "replay"]


class ErrorRule(msgspec.Struct, frozen=True):
    """`status`: the HTTP status of the code. `retry`: what a client may do about it."""

    status: int
    retry: Retry


ERROR_RULES: dict[str, ErrorRule] = {
    "bad_request": ErrorRule(400, "never"),
    "unknown_call_id": ErrorRule(400, "never"),
    "missing_tool_result": ErrorRule(400, "never"),
    "context_length_exceeded": ErrorRule(400, "never"),
    "unauthorized": ErrorRule(401, "never"),
    "not_found": ErrorRule(404, "never"),
    "session_not_found": ErrorRule(404, "never"),
    "turn_not_found": ErrorRule(404, "never"),
    "method_not_allowed": ErrorRule(405, "never"),
    "session_busy": ErrorRule(409, "never"),
    "session_moved": ErrorRule(409, "never"),
    "head_moved": ErrorRule(412, "never"),
    "payload_too_large": ErrorRule(413, "never"),
    "queue_full": ErrorRule(429, "after"),
    "quota_exceeded": ErrorRule(429, "after"),
    "engine_error": ErrorRule(500, "never"),
    "engine_restarted": ErrorRule(503, "replay"),
    "overloaded": ErrorRule(503, "after"),
    "journal_failed": ErrorRule(503, "replay"),
}


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """The body of an HTTP answer with an error status."""

    code: str
    message: str
    retry: Retry
    retry_after_ms: int | None = None
    detail: dict[str, Any] = {}


class SessionError(Exception):
    """A request that could not be served.

    Attributes:
        code: a key of `ERROR_RULES`.
        message: one sentence for a person, with the numbers that matter.
        detail: the same facts for a program.
        retry_after_ms: set where `retry` is `after`.
    """

    def __init__(
        self, code: str, message: str, *, detail: dict[str, Any] | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail or {}
        self.retry_after_ms = retry_after_ms

    @property
    def status(self) -> int:
        return ERROR_RULES[self.code].status if self.code in ERROR_RULES else 500

    @property
    def retry(self) -> Retry:
        return ERROR_RULES[self.code].retry if self.code in ERROR_RULES else "never"

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def error_body(error: SessionError) -> ErrorBody:
    """`error` as a plain HTTP answer carries it."""
    return ErrorBody(error.code, error.message, error.retry, error.retry_after_ms, error.detail)
