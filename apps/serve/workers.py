"""Threads for what would hold up the event loop: reading requests, compiling forms, fetching and decoding media.

    workers = Workers("media", each=4, tenants=2)
    found = await workers(tenant, decode, body)

Every tenant has so many of its own, and no more, so that whoever asks for what takes long holds up nobody else. What is done may have its
time (`within`), which begins with it: waiting for a thread does not count, which has a time of its own (`queued`).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from mmsdk.apps.serve.refusal import RefusedError

__all__ = ["Workers"]

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """At most `each` threads at one time for each of so many tenants; whatever more there is to do waits for its own tenant's.

    Work is waited for `within` so many seconds, and a thread for `queued`; without end where there are none given.
    """

    def __init__(self, name: str, each: int, tenants: int, within: int | float | None = None, queued: int | float | None = None) -> None:
        self._name, self._each, self._within, self._queued = name, each, within, queued
        self._pool = ThreadPoolExecutor(each * tenants, thread_name_prefix=name)
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def __call__(self, tenant: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` gives, in its turn. Whoever is cancelled waits no longer; the thread is free when the work is done.

        Raises TimeoutError where the work takes longer than it may, RefusedError (429) where no thread is free in time.
        """
        turn, loop = self._turns.setdefault(tenant, asyncio.Semaphore(self._each)), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._queued):
                await turn.acquire()
        except TimeoutError:
            told = f"all {self._each} threads for {self._name} were taken for {self._queued:g} s; come back in a moment"
            raise RefusedError(429, told, "too_many_requests", retry=1) from None
        job = self._pool.submit(work, *args, **kwargs)

        def over(_: Future[T]) -> None:
            # the loop is closed where the server has ended meanwhile
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(turn.release)

        job.add_done_callback(over)
        async with asyncio.timeout(self._within):
            return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Nothing new; what has begun comes to its end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
