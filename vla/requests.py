"""Asking the policy and judging its answers: at most one request is awaited, and only its own answer, in time, is taken.

An answer counts if it names the awaited request, comes before the deadline (by the clock and by ticks, for clocks jump), carries the
stamp it was asked with, and is a chunk that can be executed. All others are dropped: never is one taken for the next.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vla.accounting import Account
from mmsdk.vla.chunk_check import OnViolation, check_chunk, kept, readable
from mmsdk.vla.contract import Contract
from mmsdk.vla.ladder import Ladder
from mmsdk.vla.latency import Delay
from mmsdk.vla.plan import Plan
from mmsdk.vla.types import ActionChunk, Effort, Observation, Request, Stamp
from mmsdk.vla.worker import Answer, Worker

__all__ = ["Pace", "Requests", "kind_of"]

_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Pace:
    """How often each part of the policy is asked, in ticks, and how long an answer may take, in seconds.

    A request is sent every `expert` ticks, and earlier where the plan has run out. `warm_up` answers are waited for before anything moves,
    each for at most `cold` seconds. `patience` punctual answers give back work that late ones took away. Request number n carries the seed
    `seed` + n.
    """

    expert: int = 8
    adapter: int = 8
    vlm: int = 8
    deadline: float = 0.5
    warm_up: int = 1
    cold: float = 60.0
    patience: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.expert, self.adapter, self.vlm) < 1 or self.warm_up < 0 or not (self.deadline > 0 and self.cold > 0):
            raise InputError(f"{self}: ticks are at least 1, seconds above 0", item="pace")


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The request that is out: its stamp, when it was sent by the clock and by tick, and how much had been executed before the capture."""

    stamp: Stamp
    sent: float
    tick: int
    consumed: int


class Requests:
    """The loop's side of the conversation with a policy, and the plan that comes of it. Ticks are the loop's, counted from 1."""

    def __init__(self, contract: Contract, worker: Worker, plan: Plan, pace: Pace, account: Account, on_violation: OnViolation) -> None:
        self.contract, self.worker, self.plan, self.pace, self.account = contract, worker, plan, pace, account
        self.ladder, self.delay = Ladder(pace.patience), Delay()
        self.episode = 0
        self.useful = 0
        self._on_violation = on_violation
        self._awaited: _Awaited | None = None
        self._number = self._consumed = 0
        # as far back as the capture of an observation that is not stale may lie
        self._executed: deque[tuple[float, Tensor]] = deque(maxlen=int(min(contract.timing.stale * contract.rate, _LONGEST)) + 2)
        self._heard: float | None = None
        self._ran: dict[str, int] = {}
        worker.reset(self.episode)

    def begin(self, episode: int) -> None:
        """A new episode: nothing from the one before is awaited or executed any more, and the policy forgets."""
        self.episode = episode
        self.ladder.reset()
        self._ran.clear()
        self.forget()
        self.worker.reset(episode)

    def forget(self) -> None:
        """Drop the plan, and the answer that is awaited."""
        self.plan.clear()
        self._awaited = None

    def silent(self, now: float) -> float:
        """The seconds by the clock since the last useful chunk; before the first, since this was first asked."""
        if self._heard is None:
            self._heard = now
        return now - self._heard

    def pop(self, now: float) -> Float[Tensor, " a"] | None:
        """The next action of the plan, from `now` on executed."""
        action = self.plan.pop()
        if action is not None:
            self._consumed += 1
            self._executed.append((now, action))
        return action

    def ask_if_due(self, observation: Observation, tick: int, now: float) -> None:
        """Send a request where one is due and the policy is free."""
        due = tick - self._ran.get("expert", -self.pace.expert) >= self.pace.expert or not self.plan.pending().shape[0]
        if due and self._awaited is None and not self.worker.busy:
            self.ask(observation, self.ladder.asked, tick, now, now + self.pace.deadline)

    def ask(self, observation: Observation, effort: Effort, tick: int, now: float, deadline: float) -> None:
        """Send a request about this observation; its answer is awaited until the deadline. Raises ModelError where the policy is busy.

        What is pending begins at the capture, as the answer will: with what has been executed since then.
        """
        if self.worker.busy:
            raise ModelError("the policy is still at an earlier request; it is not asked twice at a time")
        self._number += 1
        self.account.requests += 1
        stamp = replace(observation.stamp, episode=self.episode).asked(self._number, deadline, self.pace.seed + self._number)
        due = self._due(effort, tick)
        self._ran.update(dict.fromkeys(due, tick))
        # after a clock was set back, what was executed before lies in the future, and is not counted
        since = [action[None] for time, action in self._executed if stamp.captured <= time <= now]
        pending = torch.cat((*since, self.plan.pending()))
        self.worker.submit(Request(replace(observation, stamp=stamp), pending, self.delay.estimate, effort, due))
        self._awaited = _Awaited(stamp, now, tick, self._consumed - len(since))

    def collect(self, tick: int, now: float, before: Sequence[Tensor]) -> None:
        """Take in what has arrived; `before` are the last commands sent, newest last."""
        self._expire(tick, now)
        for answer in self.worker.collect():
            awaited = self._awaited
            if awaited is None or answer.request != awaited.stamp.request:
                self.account.late += 1
                continue
            self._awaited = None
            fault = self._merged(answer, awaited, before)
            if fault:
                self.account.reasons[f"answer: {kind_of(fault)}"] += 1
                self.ladder.late()
            else:
                self.account.latency.append(now - awaited.sent)
                self.ladder.punctual()
                self.useful, self._heard = tick, now

    def _expire(self, tick: int, now: float) -> None:
        awaited = self._awaited
        if awaited is not None and (now > awaited.stamp.deadline or tick - awaited.tick > self.pace.deadline * self.contract.rate):
            self._awaited = None
            self.account.misses += 1
            self.ladder.late()

    def _merged(self, answer: Answer, awaited: _Awaited, before: Sequence[Tensor]) -> str:
        """Put an answer into the plan; what is wrong with it, where it is not put there."""
        if not isinstance(answer.result, ActionChunk):
            self.account.failed += 1
            return f"the policy raised {type(answer.result).__name__}"
        fault = self._put(answer.result, awaited, before)
        self.account.refused += bool(fault)
        return fault

    def _put(self, chunk: ActionChunk, awaited: _Awaited, before: Sequence[Tensor]) -> str:
        if chunk.stamp != awaited.stamp:
            return "it carries another stamp than its request"
        if not readable(chunk.actions):
            return "its actions are no tensor of floating-point numbers"
        # counted in executed actions, from the capture on: a robot that stood still while it waited has nothing to skip
        skip = self._consumed - awaited.consumed
        # commands are the CPU's, wherever the policy runs
        actions = chunk.actions.detach().cpu()
        if actions.ndim != 2:
            return f"a chunk of shape {tuple(actions.shape)}; expected rows of actions"
        if skip >= len(actions) > 0:
            return "all of it is past"
        sent = torch.stack(list(before)) if before else actions.new_zeros(0, self.contract.action_size)
        try:
            violations = check_chunk(self.contract, actions[skip:], sent)
        except SafetyError as error:
            return str(error)
        for violation in violations[:1]:
            self.account.reasons[f"chunk: {violation.limit} of {violation.name}"] += 1
        going = kept(actions[skip:], violations, self._on_violation)
        # with what is past of it, for a plan's horizon counts from the capture too
        if not self.plan.merge(actions[: skip + len(going)], skip):
            return f"nothing of it may be executed, {violations[0]}" if violations else "all of it that the plan looks at is past"
        self.delay.add(skip)
        return ""

    def _due(self, effort: Effort, tick: int) -> frozenset[str]:
        """The parts whose turn it is and that this effort includes; whatever has never run in this episode is due whatever the effort."""
        periods = {"vlm": self.pace.vlm, "adapter": self.pace.adapter}
        due = {name for name, period in periods.items() if tick - self._ran.get(name, -period) >= period}
        spared = {name for name, rung in (("adapter", Effort.SKIP_REFINE), ("vlm", Effort.REUSE_SLOW)) if effort <= rung}
        return frozenset(due - (spared & self._ran.keys()) | {"expert"})


def kind_of(told: str) -> str:
    """A message without its numbers, to count it with its like."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", told)[:80]
