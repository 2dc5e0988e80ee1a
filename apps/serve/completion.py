"""One request for a completion, from its first byte to the last of its answer.

What it holds (its seat, its place in the engine) it gives back however it ends: answered, refused, out of time, or because the client left.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmsdk.answer import Tokens
from mmsdk.apps.serve.asked import asked
from mmsdk.apps.serve.refusal import GoneError, RefusedError, refused
from mmsdk.apps.serve.reply import DONE, Reply, failed
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.wire import ChatRequest, parsed
from mmsdk.errors import MmsdkError
from mmsdk.serve.engine import Event

__all__ = ["complete"]

T = TypeVar("T")
LEFT = 499  # what servers count a request as whose client left
PATIENCE = 5.0  # seconds for the last event of a stream to go out


async def complete(service: Service, http: Request, tenant: str) -> Response:
    """The answer to a request, whole or as a stream. Raises RefusedError, and GoneError where nobody waits for it any more."""
    try:
        with ExitStack() as held:
            held.enter_context(service.seat())
            call = _Call(service, tenant, held)
            body = await call.in_time(_body(http, service.settings.body), 408, "did not arrive")
            response = await _unless_gone(http, call.in_time(call.answer(body), 504, "was not answered"))
            if isinstance(response, _Stream):
                # it gives back what is held when it ends
                response.held = held.pop_all()
            return response
    except RefusedError as refusal:
        service.metrics.ended(refusal.status)
        raise
    except GoneError:
        service.metrics.ended(LEFT)
        raise


class _Stream(StreamingResponse):
    """Events as they come. Starlette stops it when the client leaves; what it holds is given back either way.

    A client that does not read is cut off some seconds after `until`, by the clock of the event loop.
    """

    def __init__(self, pieces: AsyncIterator[bytes], until: float) -> None:
        # for proxies, which might keep pieces until there are many
        super().__init__(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.held = ExitStack()
        self._until = until

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held, suppress(TimeoutError):
            async with asyncio.timeout_at(self._until + PATIENCE):
                await super().__call__(scope, receive, send)


class _Call:
    """What answering one request needs to know."""

    def __init__(self, service: Service, tenant: str, held: ExitStack) -> None:
        self._service, self._tenant, self._held = service, tenant, held
        self._began = asyncio.get_running_loop().time()
        self._reply = Reply(service.name)
        self._counted = False

    async def in_time(self, work: Awaitable[T], status: int, told: str) -> T:
        """What `work` gives. Raises RefusedError, with this status, where the request's time is over before."""
        seconds = self._service.settings.seconds
        try:
            async with asyncio.timeout_at(self._began + seconds):
                return await work
        except TimeoutError:
            raise RefusedError(status, f"the request {told} within {seconds:g} s", "timeout") from None

    async def answer(self, body: bytes) -> Response:
        """The answer, or its stream as soon as it has begun: what is wrong with a request is known by then, and has a status."""
        loop, service = asyncio.get_running_loop(), self._service
        request = await loop.run_in_executor(service.loaders, parsed, body)
        adapter = service.adapter(request.model)
        self._reply = Reply(request.model)
        wanted = await loop.run_in_executor(service.loaders, asked, request, service.pipe.vlm, service.settings)
        ticket = service.engine.submit(wanted, self._tenant, adapter)
        self._held.callback(service.engine.cancel, ticket)
        events = ticket.events()
        first = _sound(await anext(events))
        service.metrics.begun(self._seconds)
        if request.stream:
            self._held.callback(self._left)
            return _Stream(self._pieces(first, events, request), self._began + service.settings.seconds)
        text, last = [first.text], first
        async for event in events:
            last = _sound(event)
            text.append(last.text)
        self._note(last.tokens)
        return JSONResponse(self._reply.whole("".join(text), str(last.finish), last.tokens))

    async def _pieces(self, first: Event, events: AsyncIterator[Event], request: ChatRequest) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        reply, event = self._reply, first
        yield reply.chunk({"role": "assistant", "content": event.text})
        try:
            while event.finish is None:
                event = _sound(await self.in_time(anext(events), 504, "was not answered to its end"))
                if event.text:
                    yield reply.chunk({"content": event.text})
        except MmsdkError as error:
            refusal = refused(error)
            self._count(refusal.status)
            yield failed(refusal)
            return
        self._note(event.tokens)
        yield reply.chunk({}, str(event.finish))
        if request.stream_options is not None and request.stream_options.include_usage:
            yield reply.usage(event.tokens)
        yield DONE

    def _note(self, tokens: Tokens) -> None:
        self._service.metrics.answered(tokens, self._seconds)
        self._count(200)

    def _count(self, status: int) -> None:
        self._counted = True
        self._service.metrics.ended(status)

    def _left(self) -> None:
        """A stream is over: where it came to no end, nobody reads it any more."""
        if not self._counted:
            self._service.metrics.ended(LEFT)

    @property
    def _seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._began


async def _body(http: Request, most: int) -> bytes:
    """The body of a request. Raises RefusedError for one that is longer than allowed, before it is held; GoneError where it breaks off."""
    told = f"the body has more than the {most:,} bytes that a request may have; send smaller pictures, or addresses of them"
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise RefusedError(413, told, "body_too_large")
    body = bytearray()
    try:
        async for piece in http.stream():
            body += piece
            if len(body) > most:
                raise RefusedError(413, told, "body_too_large")
    except ClientDisconnect:
        raise GoneError("the client left before its request was complete") from None
    return bytes(body)


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; where the client leaves before, work is cancelled and GoneError raised."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError("the client left before its answer")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait((task, watch))


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _sound(event: Event) -> Event:
    """The event, if it is no error. Raises RefusedError."""
    if isinstance(event.finish, MmsdkError):
        raise refused(event.finish)
    return event
