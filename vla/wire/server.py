"""A websocket server for policies, which openpi's client and `mmsdk.vla.wire.client.RemotePolicy` talk to.

with serving(PolicyServer(Service(contract, lambda: policy), port=0)) as url: ...

[published] (openpi) The first frame is the server's description, then each binary frame is a request and is answered by one of actions, or
by one of text where something went wrong; GET /healthz says OK. Ours: all the policy's work is done in a thread of its own, one request
at a time; a request that is late is not begun, and one that cannot be read ends its connection and no other.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from math import isfinite
from threading import Thread
from time import perf_counter
from typing import TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request as Handshake
from websockets.http11 import Response

from mmsdk.errors import InputError, MmsdkError, ModelError, SafetyError, WireError
from mmsdk.vla.clock import Clock, SystemClock
from mmsdk.vla.types import ActionChunk, Policy
from mmsdk.vla.wire.codec import decode, encode
from mmsdk.vla.wire.fields import Fields
from mmsdk.vla.wire.messages import Asked, read_request, write_error, write_reply
from mmsdk.vla.wire.service import Service
from mmsdk.vla.wire.turns import Turns

__all__ = ["Counts", "Limits", "PolicyServer", "serving"]

T = TypeVar("T")
_LONGEST_NAME = 1024
_LOG = logging.getLogger(__name__)
# what strangers send instead of a handshake is no event of ours
_SOCKETS = logging.getLogger(f"{__name__}.sockets")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes on: `clients` at a time, `waiting` requests of each, and `grace` seconds to answer the last ones at the end."""

    clients: int = 16
    waiting: int = 4
    grace: float = 2.0

    def __post_init__(self) -> None:
        if min(self.clients, self.waiting) < 1 or not (isfinite(self.grace) and self.grace >= 0):
            raise InputError(f"{self}: clients and waiting are at least 1, grace is not below 0", item="limits")


@dataclass(slots=True)
class Counts:
    """What a server has done: connections taken, requests answered, late, refused (what was asked) and failed (the policy)."""

    clients: int = 0
    answered: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Session:
    """One connection: its policy, the number of resets that the policy has followed (-1: none yet), the requests that came."""

    policy: Policy
    resets: int = -1
    count: int = 0


class PolicyServer:
    """Serves one policy on `host`:`port`; port 0 takes a free one. With an `api_key`, clients must bring it."""

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        limits: Limits = Limits(),
        api_key: str = "",
        clock: Clock = SystemClock(),
    ) -> None:
        if not 0 <= port < 2**16:
            raise InputError(f"{port} is no port; there are 0 (any free one) to 65535", item="port")
        self.service, self.host, self.port, self.limits, self.counts = service, host, port, limits, Counts()
        self._key, self._clock, self._open, self._busy = api_key, clock, 0, 0

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until `stop` is set; `ready` is given the address. Raises OSError where the port cannot be had.

        At the end no one new is let in, what is being answered or waits for its turn has `grace` seconds, and all connections are closed.
        """
        turns = Turns()
        try:
            async with serve(
                lambda socket: self._client(socket, turns),
                self.host,
                self.port,
                # a web page that somebody on this machine looks at is no client
                origins=[None],
                compression=None,
                process_request=self._admit,
                max_size=self.service.largest,
                max_queue=2,
                close_timeout=1.0,
                logger=_SOCKETS,
            ) as server:
                ready(_address(server))
                await stop.wait()
                await self._end(server)
        finally:
            turns.close()

    async def _end(self, server: Server) -> None:
        server.close(close_connections=False)
        until = perf_counter() + self.limits.grace
        while self._busy and perf_counter() < until:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(socket.close(CloseCode.GOING_AWAY, "the server ends") for socket in server.connections))

    def _admit(self, socket: ServerConnection, handshake: Handshake) -> Response | None:
        """Before a connection: a sign of life for who asks for it, and nobody without the key or beyond the number of clients."""
        if handshake.path == "/healthz":
            return socket.respond(HTTPStatus.OK, "OK\n")
        brought = "\n".join(handshake.headers.get_all("Authorization")).encode(errors="surrogateescape")
        if self._key and not hmac.compare_digest(brought, f"Api-Key {self._key}".encode()):
            return socket.respond(HTTPStatus.UNAUTHORIZED, "this server wants a key: Authorization: Api-Key ...\n")
        if self._open >= self.limits.clients:
            return socket.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._open} clients are here already\n")
        return None

    async def _client(self, socket: ServerConnection, turns: Turns) -> None:
        self._open += 1
        self.counts.clients += 1
        inbox: asyncio.Queue[tuple[bytes | str, float]] = asyncio.Queue(self.limits.waiting)
        try:
            # the end of reading, which is the end of the connection, ends the answering and whatever waits for its turn
            async with asyncio.TaskGroup() as group:
                group.create_task(self._answer(socket, turns, inbox))
                group.create_task(self._read(socket, inbox))
        except* ConnectionClosed:
            pass
        finally:
            self._open -= 1

    async def _read(self, socket: ServerConnection, inbox: asyncio.Queue[tuple[bytes | str, float]]) -> None:
        """Take frames in at once, so that a request's time runs from its arrival and not from its turn."""
        while True:
            frame = await socket.recv()
            if inbox.full():
                told = WireError(f"more than {self.limits.waiting} requests wait for an answer")
                await _hang_up(socket, told, CloseCode.POLICY_VIOLATION)
            else:
                inbox.put_nowait((frame, self._clock.now()))

    async def _answer(self, socket: ServerConnection, turns: Turns, inbox: asyncio.Queue[tuple[bytes | str, float]]) -> None:
        await socket.send(encode(self.service.told()))
        try:
            session = _Session(await _turn(turns, self.service.session))
        except MmsdkError as error:
            await _hang_up(socket, error, CloseCode.INTERNAL_ERROR)
            return
        while True:
            frame, arrived = await inbox.get()
            self._busy += 1
            try:
                fields = _opened(frame)
            except InputError as error:
                self.counts.refused += 1
                await _hang_up(socket, error, CloseCode.INVALID_DATA)
                return
            else:
                await socket.send(await self._reply(session, turns, fields, arrived))
            finally:
                self._busy -= 1

    async def _reply(self, session: _Session, turns: Turns, fields: Fields, arrived: float) -> bytes | str:
        session.count += 1
        number = 0
        try:
            number = fields.whole("mmsdk/request", 0)
            asked = read_request(fields, number, self.service, arrived, session.count)
            chunk, seconds, waited = await _turn(turns, lambda: self._act(session, asked, arrived))
        except MmsdkError as error:
            self._count(error)
            return write_error(error, number)
        self.counts.answered += 1
        return write_reply(asked, chunk, seconds, waited)

    def _act(self, session: _Session, asked: Asked, arrived: float) -> tuple[ActionChunk, float, float]:
        """The chunk, the seconds that it took and those that the request waited. In the policy's thread."""
        stamp, due = asked.request.observation.stamp, arrived + asked.budget
        waited = self._clock.now() - arrived
        if session.resets != asked.resets:
            session.policy.reset(stamp.episode)
            session.resets = asked.resets
        if waited > asked.budget:
            raise WireError(f"late: its turn came after {waited:.3f} s, of use were {asked.budget:.3f} s")
        begun = perf_counter()
        chunk = session.policy(asked.request)
        # looking at the numbers waits for a GPU that is still at them
        self._check(chunk, asked)
        seconds = perf_counter() - begun
        if self._clock.now() > due:
            raise WireError(f"late: {seconds:.3f} s for the answer after {waited:.3f} s for its turn, of use were {asked.budget:.3f} s")
        return chunk, seconds, waited

    def _check(self, chunk: ActionChunk, asked: Asked) -> None:
        """Not every client has a gate of its own."""
        if chunk.stamp != asked.request.observation.stamp:
            raise ModelError("the policy answers with another stamp than it was asked with")
        if not _is_text(chunk.producer):
            raise ModelError(f"the policy does not say who made its answer: {repr(chunk.producer)[:80]}")
        size = self.service.contract.action_size
        if not chunk.actions.is_floating_point():
            raise ModelError(f"the policy answers with {chunk.actions.dtype}, expected floating-point numbers")
        if chunk.actions.ndim != 2 or not chunk.actions.shape[0] or chunk.actions.shape[1] != size:
            raise SafetyError(f"the policy answers with a chunk of shape {tuple(chunk.actions.shape)}, expected actions of {size} numbers")
        if not bool(chunk.actions.isfinite().all()):
            raise SafetyError("the policy answers with NaN or infinity")

    def _count(self, error: MmsdkError) -> None:
        self.counts.late += isinstance(error, WireError)
        self.counts.refused += isinstance(error, InputError)
        self.counts.failed += not isinstance(error, WireError | InputError)


@contextmanager
def serving(server: PolicyServer) -> Iterator[str]:
    """Serve from a thread beside this program; gives the address. Raises OSError where the port cannot be had."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = Thread(target=lambda: asyncio.run(_beside(server, started)), name="policy server", daemon=True)
    thread.start()
    url, loop, stop = started.result()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _beside(server: PolicyServer, started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    stop = asyncio.Event()
    try:
        await server.run(stop, lambda url: started.set_result((url, asyncio.get_running_loop(), stop)))
    except OSError as error:
        started.set_exception(error)
    finally:
        # whatever else went wrong, nobody waits for ever
        started.cancel()


def _is_text(value: object) -> bool:
    """Whether it can be sent, and read: half of a surrogate pair, which Python's texts may hold, is no Unicode."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _opened(frame: bytes | str) -> Fields:
    if isinstance(frame, str):
        raise InputError("a frame of text; requests are binary", item="message")
    return Fields(decode(frame))


async def _turn(turns: Turns, call: Callable[[], T]) -> T:
    """What `call` returns at its turn. Whatever else than an error of ours it raises becomes one, and is logged."""
    future = asyncio.wrap_future(turns(call))
    try:
        await asyncio.wait([future])
    finally:
        # where the client went away meanwhile
        future.cancel()
    error = future.exception()
    if error is None or isinstance(error, MmsdkError):
        return future.result()
    _LOG.error("the policy raised", exc_info=error)
    raise ModelError(f"the policy raised {type(error).__name__}: {error}") from error


async def _hang_up(socket: ServerConnection, error: MmsdkError, code: CloseCode) -> None:
    await socket.send(write_error(error, 0))
    await socket.close(code, "see the frame before this one")


def _address(server: Server) -> str:
    host, port = next(iter(server.sockets)).getsockname()[:2]
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"
