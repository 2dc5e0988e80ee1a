"""The engine in a thread of its own: orders go in from asynchronous code, events come out, and neither side waits for the other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType

from mmsdk.apps.serve.asked import Asked
from mmsdk.errors import ModelError
from mmsdk.serve.engine import Engine, Event

__all__ = ["EngineThread", "Ticket"]

_GONE = ModelError("the engine has ended; ask again when the server is back")


class Ticket:
    """A request that the engine was given, with so many answers, seen from the event loop that asks."""

    def __init__(self, answers: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.answers = answers

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """What happens to it, and to which of its answers, up to and with the end of the last one."""
        going = self.answers
        while going:
            place, event = await self._events.get()
            going -= event.finish is not None
            yield place, event

    def tell(self, place: int, event: Event) -> None:
        """From the engine's thread: something happened."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (place, event))


class EngineThread:
    """Steps an engine for as long as it has work, and sleeps while it has none. The engine is nobody else's meanwhile.

    `held` and `speaking` are blocks that requests hold, and requests in the engine, after the last step; `ended` is done when the thread
    is, with its error where the engine raised one: all who wait are told then.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: SimpleQueue[tuple[Callable[[], object], Ticket | None]] = SimpleQueue()
        # whose answer a number of the engine's is, and which one
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        self._numbers: dict[Ticket, list[int]] = {}
        self._going, self._over = True, False
        self.held = 0
        self.speaking = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.ended: Future[None] = Future()

    def __enter__(self) -> "EngineThread":
        self.ended = self._pool.submit(self._run)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._orders.put((self._leave, None))
        self._pool.shutdown()

    def submit(self, asked: Asked, tenant: str, adapter: str = "") -> Ticket:
        """Hand a request over. Called in an event loop, which is where its events are told."""
        ticket = Ticket(len(asked.configs))
        self._orders.put((partial(self._take, ticket, asked, tenant, adapter), ticket))
        if self._over:
            # Nobody obeys any more; whichever of the two threads takes an order out tells of it.
            self._refuse()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, if it has not ended: what it holds is free before the next step."""
        self._orders.put((partial(self._drop, ticket), None))

    def _run(self) -> None:
        try:
            while self._going:
                self._obey()
                for event in self._engine.step() if self._engine.busy else ():
                    self._tell(event)
                self.held, self.speaking = self._engine.held, len(self._tickets)
        finally:
            self._engine.close()
            for number in list(self._tickets):
                self._tell(Event(number, (), "", _GONE))
            self._over = True
            self._refuse()
            self.held, self.speaking = self._engine.held, 0

    def _obey(self) -> None:
        """All orders that have come; where there is nothing else to do, wait for one."""
        if not self._engine.busy:
            self._orders.get()[0]()
        while not self._orders.empty():
            self._orders.get()[0]()

    def _refuse(self) -> None:
        """Tell those whose orders came too late."""
        while True:
            try:
                _, ticket = self._orders.get_nowait()
            except Empty:
                return
            if ticket is not None:
                for place in range(ticket.answers):
                    ticket.tell(place, Event(0, (), "", _GONE))

    def _take(self, ticket: Ticket, asked: Asked, tenant: str, adapter: str) -> None:
        for place, (config, guide) in enumerate(zip(asked.configs, asked.guides, strict=True)):
            number = self._engine.submit([], asked.prompt, config, tenant, adapter, guide)
            self._tickets[number] = ticket, place
            self._numbers.setdefault(ticket, []).append(number)

    def _drop(self, ticket: Ticket) -> None:
        for number in self._numbers.pop(ticket, ()):
            self._engine.cancel(number)
            del self._tickets[number]

    def _tell(self, event: Event) -> None:
        ticket, place = self._tickets[event.number]
        if event.finish is not None:
            del self._tickets[event.number]
            self._numbers[ticket].remove(event.number)
            if not self._numbers[ticket]:
                del self._numbers[ticket]
        ticket.tell(place, event)

    def _leave(self) -> None:
        self._going = False
