"""What a client is told where it gets no answer: OpenAI's shape of an error, and the status that fits."""

from mmsdk.errors import InputError, MmsdkError
from mmsdk.generate.constrain import LostError

__all__ = ["GoneError", "RefusedError", "refused"]

LONGEST, PLACE = 2000, 200  # letters of a message and of a place: what was sent, which may be long, stands in both
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class RefusedError(MmsdkError):
    """A request that is not answered, with a status, a code for programs and words for people.

    `param` names the item of the request that is at fault, as in "messages[0].content[1]"; `retry`: after how many seconds to come back.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None, retry: int | None = None) -> None:
        super().__init__(message[:LONGEST])
        self.status, self.code, self.param, self.retry = status, code, param and param[:PLACE], retry

    @property
    def told(self) -> dict[str, dict[str, str | None]]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """When to come back, where that is known, and what a key is brought in."""
        again = {} if self.retry is None else {"Retry-After": str(self.retry)}
        return again | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


class GoneError(MmsdkError):
    """The client went away before its answer."""


def refused(error: MmsdkError) -> RefusedError:
    """An error of the engine's: what is wrong with the request is the client's to mend, all else is not."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, LostError):
        return RefusedError(503, str(error), "unavailable", retry=1)
    if not isinstance(error, InputError):
        return RefusedError(500, str(error), "model_error")
    if error.item == "prompt":
        return RefusedError(400, str(error), "context_length_exceeded", "messages")
    return RefusedError(400, str(error), "invalid_value", error.item or None)
