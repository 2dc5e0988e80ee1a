"""One request for a completion, from its first byte to the last of its answer.

What it holds (its seat, its place in the engine) it gives back however it ends: answered, refused, out of time, or because the client left.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmsdk.answer import Tokens
from mmsdk.apps.serve.asked import asked, settled
from mmsdk.apps.serve.form import Form, form_of, formed
from mmsdk.apps.serve.refusal import GoneError, RefusedError, refused
from mmsdk.apps.serve.reply import DONE, Reply, failed
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import LONGEST
from mmsdk.apps.serve.wire import ChatRequest, parsed
from mmsdk.errors import MmsdkError
from mmsdk.serve.engine import Event

__all__ = ["complete"]

T = TypeVar("T")
LEFT = 499  # what servers count a request as whose client left
FAILED = 500  # what nobody foresaw
PATIENCE = 5.0  # seconds for the last event of a stream to go out
ENDING = 1.0  # and for that of one that the server's end cuts off


async def complete(service: Service, http: Request, tenant: str) -> Response:
    """The answer to a request, whole or as a stream. Raises RefusedError, and GoneError where nobody waits for it any more."""
    status = FAILED
    try:
        with ExitStack() as held:
            held.enter_context(service.seat(tenant))
            call = _Call(service, tenant, held)
            body = await call.in_time(_body(http, service.settings.body), 408, "did not arrive", service.settings.arrival)
            response = await _unless_gone(http, call.in_time(call.answer(body), 504, "was not answered"))
            if isinstance(response, _Stream):
                # it gives back what is held when it ends
                response.held = held.pop_all()
            # the answer, or its stream when it ends, counts itself
            status = 0
            return response
    except RefusedError as refusal:
        status = refusal.status
        raise
    except GoneError:
        status = LEFT
        raise
    finally:
        if status:
            service.metrics.ended(status)


class _Stream(StreamingResponse):
    """Events as they come. Starlette stops it when the client leaves; what it holds is given back either way.

    A client that does not read is cut off some seconds after `until`, by the clock of the event loop, or after the end of the server.
    """

    def __init__(self, pieces: AsyncIterator[bytes], until: float, service: Service) -> None:
        # for proxies, which might keep pieces until there are many
        super().__init__(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.held = ExitStack()
        self._until, self._service = until, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held, suppress(TimeoutError):
            async with asyncio.timeout_at(self._until + PATIENCE) as limit:
                with self._service.until_cut(limit, ENDING):
                    await super().__call__(scope, receive, send)


class _Call:
    """What answering one request needs to know."""

    def __init__(self, service: Service, tenant: str, held: ExitStack) -> None:
        self._service, self._tenant, self._held = service, tenant, held
        self._began = asyncio.get_running_loop().time()
        self._counted = False
        self._wanted = Form.free(1)

    async def in_time(self, work: Awaitable[T], status: int, told: str, within: float = LONGEST) -> T:
        """What `work` gives. Raises RefusedError where the request's time is over before, with this status, or the server is."""
        seconds = min(self._service.settings.seconds, within)
        try:
            async with asyncio.timeout_at(self._began + seconds) as limit:
                with self._service.until_cut(limit):
                    return await work
        except TimeoutError:
            if self._service.over:
                raise RefusedError(503, f"the server ended: the request {told}", "unavailable", retry=5) from None
            raise RefusedError(status, f"the request {told} within {seconds:g} s", "timeout") from None

    async def answer(self, body: bytes) -> Response:
        """The answer, or its stream as soon as it has begun: what is wrong with a request is known by then, and has a status."""
        service, tenant = self._service, self._tenant
        request = await service.loaders(tenant, parsed, body)
        adapter, configs = service.adapter(request.model), settled(request, service.settings)
        self._wanted = form = await self._form(request, len(configs))
        wanted = await service.loaders(tenant, asked, request, configs, form, service.pipe.vlm, service.settings)
        for _ in configs[1:]:
            # each answer takes the place of a request
            self._held.enter_context(service.seat(tenant))
        ticket = service.engine.submit(wanted, tenant, adapter)
        self._held.callback(service.engine.cancel, ticket)
        events = ticket.events()
        first = self._sound(await anext(events))
        service.metrics.begun(self._seconds)
        reply = Reply(request.model, service.pipe.vlm.tokenizer, wanted.likeliest)
        if request.stream:
            self._held.push(self._over)
            usage = request.stream_options is not None and request.stream_options.include_usage
            return _Stream(self._pieces(reply, first, events, usage), self._began + service.settings.seconds, service)
        said: list[list[Event]] = [[] for _ in wanted.configs]
        said[first[0]].append(first[1])
        async for one in events:
            place, event = self._sound(one)
            said[place].append(event)
        tokens = _counted([answer[-1] for answer in said])
        self._note(tokens)
        return JSONResponse(reply.whole(said, tokens))

    async def _pieces(
        self, reply: Reply, first: tuple[int, Event], events: AsyncIterator[tuple[int, Event]], usage: bool
    ) -> AsyncIterator[bytes]:
        """The answers as server-sent events."""
        begun, ends = set[int](), list[Event]()
        try:
            async for place, event in self._timed(first, events):
                role = {} if place in begun else {"role": "assistant"}
                begun.add(place)
                if role or event.text or event.logprobs:
                    yield reply.chunk(place, role | {"content": event.text}, event.logprobs)
                if event.finish is not None:
                    ends.append(event)
                    yield reply.chunk(place, {}, (), str(event.finish))
        except MmsdkError as error:
            refusal = refused(error)
            self._count(refusal.status)
            yield failed(refusal)
            return
        self._note(_counted(ends))
        if usage:
            yield reply.usage(_counted(ends))
        yield DONE

    async def _timed(self, first: tuple[int, Event], events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[tuple[int, Event]]:
        """What happens, from the first event on, as long as the request has time. Raises RefusedError."""
        yield first
        while (one := await self.in_time(anext(events, None), 504, "was not answered to its end")) is not None:
            yield self._sound(one)

    def _note(self, tokens: Tokens) -> None:
        self._service.metrics.answered(tokens, self._seconds)
        self._count(200)

    def _count(self, status: int) -> None:
        self._counted = True
        self._service.metrics.ended(status)

    async def _form(self, request: ChatRequest, answers: int) -> Form:
        """The form of the answers. Raises RefusedError, for one that takes too long, too: its thread is the tenant's own meanwhile.

        Where there is none, nothing is waited for.
        """
        if not formed(request):
            return Form.free(answers)
        try:
            return await self._service.forms(self._tenant, form_of, request, answers, self._service.pipe.vlm, self._tenant)
        except TimeoutError:
            seconds = self._service.settings.forming
            raise RefusedError(400, f"the form of the answer was not compiled within {seconds:g} s", "form_too_costly") from None

    def _sound(self, one: tuple[int, Event]) -> tuple[int, Event]:
        """What happened, if it is no error. Raises RefusedError."""
        if isinstance(one[1].finish, MmsdkError):
            raise self._wanted.refused(one[1].finish)
        return one

    def _over(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A stream is over: where it came to no end, nobody reads it any more, or it broke."""
        if not self._counted:
            broke = isinstance(error, Exception) and not isinstance(error, ClientDisconnect)
            self._service.metrics.ended(FAILED if broke else LEFT)

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


def _counted(ends: Sequence[Event]) -> Tokens:
    """What a request took: its prompt once, and all that was said."""
    return replace(ends[0].tokens, generated=sum(event.tokens.generated for event in ends))
