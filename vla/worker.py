"""Who runs the policy while the loop goes on: one at a time, each answer named by the request that it answers.

A policy may raise or never return; both stay on the worker's side, as an answer that is an error or as none at all.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Thread
from types import TracebackType
from typing import Protocol, runtime_checkable

from mmsdk.vla.clock import Clock
from mmsdk.vla.types import ActionChunk, Policy, Request
from mmsdk.vla.unwaited import POLICY_THREAD

__all__ = ["Answer", "Delayed", "Threaded", "Worker"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request: a chunk, or what the policy raised."""

    request: int
    result: ActionChunk | BaseException


@runtime_checkable
class Worker(Protocol):
    """Takes requests and hands back answers, without ever blocking."""

    @property
    def busy(self) -> bool:
        """Whether the policy is still at an earlier request."""
        ...

    def reset(self, episode: int) -> None:
        """A new episode begins, for the policy too, before its next request."""
        ...

    def submit(self, request: Request) -> None:
        """Begin with a request; only where not busy."""
        ...

    def collect(self) -> list[Answer]:
        """The answers that have arrived since, in the order of their arrival."""
        ...


class Threaded:
    """Runs the policy in a thread beside the loop. A policy that hangs keeps it busy: nothing is asked of a policy twice at a time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._running: tuple[int, Future[ActionChunk]] | None = None
        self._episode: int | None = None

    @property
    def busy(self) -> bool:
        """See `Worker`."""
        return self._running is not None and not self._running[1].done()

    def reset(self, episode: int) -> None:
        """See `Worker`."""
        self._episode = episode

    def submit(self, request: Request) -> None:
        """See `Worker`."""
        assert not self.busy, "the policy is still at an earlier request"
        future: Future[ActionChunk] = Future()
        # a daemon: the end of the program does not wait for a policy that hangs
        Thread(target=_act, args=(self._policy, request, self._episode, future), name=POLICY_THREAD, daemon=True).start()
        self._running, self._episode = (request.observation.stamp.request, future), None

    def collect(self) -> list[Answer]:
        """See `Worker`."""
        if self._running is None or not self._running[1].done():
            return []
        number, future = self._running
        self._running = None
        return [Answer(number, future.exception() or future.result())]

    def finish(self) -> list[Answer]:
        """The answers once the policy is done, however long that takes: for simulations, whose time stands still meanwhile."""
        if self._running is not None:
            wait([self._running[1]])
        return self.collect()


def _act(policy: Policy, request: Request, episode: int | None, future: "Future[ActionChunk]") -> None:
    with _HandedTo(future):
        if episode is not None:
            policy.reset(episode)
        future.set_result(policy(request))


@dataclass(frozen=True, slots=True)
class _HandedTo:
    """What is raised inside becomes the future's exception, as in `concurrent.futures`, whose own threads the program's end waits for."""

    future: "Future[ActionChunk]"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            self.future.set_exception(error)
        return True


class Delayed:
    """For simulations: the policy thinks at once, and its answer arrives `latency` seconds later by the simulated clock.

    Deterministic, whatever the machine: what latency does to success can be measured without waiting for it.
    """

    def __init__(self, policy: Policy, clock: Clock, latency: Callable[[Request], float]) -> None:
        self._inner = Threaded(policy)
        self._clock = clock
        self._latency = latency
        self._due: tuple[float, Answer] | None = None

    @property
    def busy(self) -> bool:
        """See `Worker`."""
        return self._due is not None

    def reset(self, episode: int) -> None:
        """See `Worker`."""
        self._inner.reset(episode)

    def submit(self, request: Request) -> None:
        """See `Worker`."""
        assert not self.busy, "the policy is still at an earlier request"
        self._inner.submit(request)
        (answer,) = self._inner.finish()
        self._due = self._clock.now() + self._latency(request), answer

    def collect(self) -> list[Answer]:
        """See `Worker`."""
        if self._due is None or self._clock.now() < self._due[0]:
            return []
        answer = self._due[1]
        self._due = None
        return [answer]
