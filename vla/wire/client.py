"""A policy behind a wire: it is asked like one that is here, and answers with the same numbers, or in time with an error.

with RemotePolicy("ws://192.168.0.7:8000", robot.contract) as policy:
    print(ControlLoop(robot, policy, hz=20).run(ticks=400))
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Lock, Thread
from types import TracebackType
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.protocol import State

from mmsdk.errors import InputError, MmsdkError, WireError
from mmsdk.vla.clock import Clock, SystemClock
from mmsdk.vla.contract import Contract
from mmsdk.vla.types import ActionChunk, Request
from mmsdk.vla.wire.codec import decode
from mmsdk.vla.wire.messages import Asked, Reply, read_error, read_reply, write_request
from mmsdk.vla.wire.service import Offer

__all__ = ["RemotePolicy", "Retry"]

_LARGEST_ANSWER = 2**24
_UNAUTHORIZED = 401
_MUTE = "it does not say who it is"


@dataclass(frozen=True, slots=True)
class Retry:
    """How a client goes on where a connection fails. Times are in seconds.

    Between attempts to connect it waits `first`, then twice as long each time, at most `longest`. After `silent` requests in a row without
    an answer it connects anew. No request takes longer than `patience`, be its deadline ever so far.
    """

    first: float = 0.1
    longest: float = 5.0
    silent: int = 3
    patience: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest or self.silent < 1 or not self.patience > 0:
            raise InputError(f"{self}: times are above 0, first is at most longest, silent at least 1", item="retry")


class RemotePolicy:
    """A `Policy` that a `PolicyServer` serves. It connects at the first request, and again whenever the connection was lost.

    A request is sent once: where its connection breaks, or its deadline passes, it raises WireError, and the next one may do better. An
    answer is taken for its own request only; one that comes late is dropped and counted in `dropped`. Requests are sent one at a time.
    """

    def __init__(self, url: str, contract: Contract, *, clock: Clock = SystemClock(), retry: Retry = Retry(), api_key: str = "") -> None:
        """`contract` is the robot's, by whose clock deadlines are told. Raises InputError for an address that is none."""
        if not _is_address(url):
            raise InputError("expected an address like ws://host:8000", item=url)
        self.url, self.contract, self.clock, self.retry, self.dropped = url, contract, clock, retry, 0
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._turn, self._number, self._resets, self._silent = Lock(), 0, 0, 0
        self._line: tuple[ClientConnection, Offer] | None = None
        self._pause, self._next, self._fault = retry.first, 0.0, _MUTE
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._live(started)), name="remote policy", daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result()

    def __enter__(self) -> "RemotePolicy":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Nothing can be asked afterwards."""
        with self._turn:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()

    def reset(self, episode: int) -> None:
        """See `Policy`. The server's policy follows with the next request."""
        self._resets += 1

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`.

        Raises WireError where no answer comes within the deadline or the connection breaks, InputError where the server's policy is for
        another robot or the request is not for this one, and whatever error of ours the policy raised.
        """
        stamp = request.observation.stamp
        with self._turn:
            left = min(stamp.deadline - self.clock.now(), self.retry.patience)
            if not self._thread.is_alive() or left <= 0:
                raise WireError("the connection was closed" if left > 0 else f"the deadline was {-left:.3f} s before the request")
            self._number += 1
            asked = Asked(self._number, request, left, self._resets)
            reply = asyncio.run_coroutine_threadsafe(self._ask(asked), self._loop).result()
        return ActionChunk(reply.actions, stamp, reply.producer)

    async def _live(self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        if self._line is not None:
            await self._line[0].close()

    async def _ask(self, asked: Asked) -> Reply:
        due = asyncio.get_running_loop().time() + asked.budget
        async with self._within(asked.budget, due):
            socket, offer = await self._connected()
            left = due - asyncio.get_running_loop().time()
            frame = write_request(Asked(asked.number, asked.request, left, asked.resets), self.contract, offer.keys)
            if len(frame) > offer.largest:
                raise InputError(f"{len(frame)} bytes, the server takes {offer.largest}", item="request")
            await socket.send(frame)
            return await self._answer(socket, asked.number)

    @asynccontextmanager
    async def _within(self, budget: float, due: float) -> AsyncIterator[None]:
        """Ends in time, and knows what to make of silence and of broken connections."""
        try:
            async with asyncio.timeout_at(due):
                yield
        except TimeoutError:
            self._silent += 1
            if self._line is None:
                raise WireError(f"{self.url} cannot be reached within {budget:.3f} s: {self._fault}") from None
            if self._silent >= self.retry.silent:
                self._hang_up()
            raise WireError(f"{self.url} gives no answer within {budget:.3f} s") from None
        except ConnectionClosed as error:
            self._hang_up()
            raise WireError(f"{self.url} has hung up: {error}") from None

    def _hang_up(self) -> None:
        """At once: a peer that does not answer does not say goodbye either."""
        if self._line is not None:
            self._line[0].transport.abort()
        self._line, self._silent = None, 0

    async def _connected(self) -> tuple[ClientConnection, Offer]:
        """The connection and what the server offers, made anew where there is none: again and again until the time is up."""
        while self._line is None or self._line[0].state is not State.OPEN:
            self._line = None
            await asyncio.sleep(self._next - asyncio.get_running_loop().time())
            try:
                self._line = await self._connect()
                self._fault = _MUTE
            except InvalidStatus as error:
                if error.response.status_code == _UNAUTHORIZED:
                    raise WireError(f"{self.url} refuses the key: {error}") from None
                self._failed(error)
            except (OSError, InvalidHandshake, ConnectionClosed) as error:
                self._failed(error)
        return self._line

    async def _connect(self) -> tuple[ClientConnection, Offer]:
        socket = await connect(
            self.url, additional_headers=self._headers, compression=None, proxy=None, max_size=_LARGEST_ANSWER, close_timeout=1.0
        )
        try:
            first = await socket.recv()
            if isinstance(first, str):
                raise read_error(first)[1]
            return socket, Offer.of(_told(first), self.contract)
        except (MmsdkError, asyncio.CancelledError):
            # it is not who it should be, or the time was up before it said so
            socket.transport.abort()
            raise

    def _failed(self, error: Exception) -> None:
        self._fault = str(error) or type(error).__name__
        self._next = asyncio.get_running_loop().time() + self._pause
        self._pause = min(2 * self._pause, self.retry.longest)

    async def _answer(self, socket: ClientConnection, number: int) -> Reply:
        """The answer with this number; others were for requests that have been given up."""
        while True:
            frame = await socket.recv()
            answer = read_error(frame) if isinstance(frame, str) else read_reply(frame)
            # an error that names no request is about the connection, and so about this one; actions that name none are nobody's
            mine = answer.number == number if isinstance(answer, Reply) else answer[0] in (number, 0)
            if not mine:
                self.dropped += 1
                continue
            self._silent, self._pause = 0, self.retry.first
            if isinstance(answer, Reply):
                return answer
            raise answer[1]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # a port that is none is found when it is asked for
        return parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0 and not any(map(str.isspace, url))
    except ValueError:
        return False


def _told(first: bytes) -> dict[str, object]:
    try:
        return decode(first)
    except InputError as error:
        raise WireError(f"its first message cannot be read: {error}") from None
