"""Every way in which the gateway refuses or fails a request, split by whose fault it is.

A fault carries its HTTP status, the type and code of the OpenAI error object, whether asking again can help, and a
message that says what to do. It becomes bytes in one place: `gateway.core.shapes`.
"""

from __future__ import annotations

from typing import ClassVar


class Fault(Exception):
    """Base of all faults. `param` names the field, header or setting at fault; `retry_after` is in seconds."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    retry: ClassVar[bool | None] = None
    """False: asking again is useless (`x-should-retry: false`); None: the client's own rules apply."""

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class CallerFault(Fault):
    """The request is wrong, or cannot be served under the promise that is configured."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"
    retry: ClassVar[bool | None] = False


class Unauthorized(CallerFault):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(CallerFault):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(CallerFault):
    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class WrongMethod(CallerFault):
    """`allow`: the methods that are taken."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class Conflict(CallerFault):
    status = 409
    type = "conflict_error"
    code = "conflict"


class Gone(CallerFault):
    status = 410
    type = "gone_error"
    code = "gone"


class Aborted(CallerFault):
    code = "aborted"


class TooLarge(CallerFault):
    status = 413
    code = "request_too_large"


class Encoded(CallerFault):
    """The body came compressed, which no engine reads either."""

    status = 415
    code = "encoded_body"


class TooSlow(CallerFault):
    status = 408
    code = "request_timeout"
    retry: ClassVar[bool | None] = None


class Busy(Fault):
    """The gateway cannot take the request now: a full queue, no healthy replica, a drain. Safe to ask again."""

    status = 503
    type = "overloaded_error"
    code = "unavailable"

    def __init__(self, message: str, *, code: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, code=code, retry_after=retry_after)


class TooMany(Busy):
    """The same where the API at hand has a status of its own for it."""

    status = 429
    type = "rate_limit_error"


class StoreFault(Busy):
    """The shared state did not answer; nothing was claimed that could be handed out again."""

    code = "store_unavailable"


class UpstreamFault(Fault):
    """A replica broke before it had answered."""

    status = 502
    type = "upstream_error"
    code = "upstream_unavailable"


class AnswerTooLarge(UpstreamFault):
    """An answer that is no stream has more bytes than are held of one."""

    code = "answer_too_large"
    retry = False


class UpstreamTimeout(UpstreamFault):
    status = 504
    code = "upstream_timeout"
