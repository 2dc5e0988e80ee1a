"""The server's life: listen, serve until told to stop, finish what runs, end.

with serving(Service(pipe, Settings())) as url: ...
"""

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmsdk.apps.beforehand import listening
from mmsdk.apps.serve.app import build
from mmsdk.apps.serve.service import Service

__all__ = ["serve", "serving"]

HEAD = 10.0  # seconds for the head of a request to come in
LAST = 2.0  # seconds for the last words to those who are cut off

Started = tuple[asyncio.AbstractEventLoop, asyncio.Event, str]


async def serve(
    service: Service, door: socket.socket, stop: asyncio.Event, ready: Callable[[str], None], hurry: asyncio.Event | None = None
) -> None:
    """Serve until `stop` is set; `ready` is given the address. What runs then has the settings' `grace` to finish, or until `hurry` is set.

    Who has no answer by then is told so. Raises what the engine raised, where it broke: all who waited were told.
    """
    # uvicorn's own patience is longer than ours: whom it cuts off it tells nothing
    patience = math.ceil(service.settings.grace + 2 * LAST)
    config = uvicorn.Config(
        build(service),
        http=_Hurried,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=patience,
    )
    server = _Server(config, partial(ready, _address(door)))
    with service.engine:
        running = asyncio.create_task(server.serve([door]))
        await _first(stop, running, asyncio.wrap_future(service.engine.ended))
        service.ending = server.should_exit = True
        await _first(hurry or asyncio.Event(), running, within=service.settings.grace)
        service.cut()
        await asyncio.wait((running,), timeout=LAST)
        # whoever does not read keeps nobody here
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await running
        # who was cut off gives back what it held
        while service.open:
            await asyncio.sleep(0.01)
        service.loaders.close()
        service.forms.close()
    service.engine.ended.result()


async def _first(event: asyncio.Event, *others: asyncio.Future[Any], within: float | None = None) -> None:
    """Wait for an event, for what else may come first, and for so many seconds at most."""
    waiting: asyncio.Future[Any] = asyncio.create_task(event.wait())
    await asyncio.wait((*others, waiting), timeout=within, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to the program and says when it serves."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        await super().startup(sockets)
        self._ready()


class _Hurried(H11Protocol):
    """uvicorn's, which closes a connection whose next request has not said in time what it wants: such would be held for nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Somebody came."""
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD, transport.close)

    def data_received(self, data: bytes) -> None:
        """A piece of a request: of its head, if none is being answered afterwards."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()
        elif self._late.cancelled():
            self._late = self.loop.call_later(HEAD, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """They left."""
        self._late.cancel()
        super().connection_lost(exc)


@contextmanager
def serving(service: Service, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve from a thread beside this program; gives the address.

    Raises InputError where the port cannot be had, and at the end what the engine raised, where it broke.
    """
    door, started = listening(host, port), Future[Started]()
    with ThreadPoolExecutor(1, thread_name_prefix="server") as pool:
        ended = pool.submit(lambda: asyncio.run(_beside(service, door, started)))
        # whatever goes wrong, nobody waits for ever
        ended.add_done_callback(lambda _: started.cancel())
        loop, stop, url = started.result()
        try:
            yield url
        finally:
            # its loop is closed where the engine broke
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
            ended.result()


async def _beside(service: Service, door: socket.socket, started: Future[Started]) -> None:
    stop = asyncio.Event()
    await serve(service, door, stop, lambda url: started.set_result((asyncio.get_running_loop(), stop, url)))


def _address(door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
