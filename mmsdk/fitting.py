"""From a target to a token budget: the largest that keeps a question's prefill within its time, by this machine's latency model.

Each row is fitted by itself, before anything is encoded: counts of tokens are known from the sizes of its media. What is found is a count
or a share like any other, and is met as exactly.
"""

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from mmsdk.compress import Compression, Method, Step
from mmsdk.encoded import Encoded
from mmsdk.errors import BudgetError, InputError, MmsdkError
from mmsdk.kv.memory import Memory
from mmsdk.latency import Latency, latency_of
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt
from mmsdk.target import Target
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.types import Thinner
from mmsdk.vision.prune import Pruner
from mmsdk.vision.shorten import PruningEncoder, Shortener, ShorteningEncoder
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["Fit", "before", "behind", "by_plan", "inside_encoder", "lengths"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Fit:
    """Plans the rows of a batch: what was asked for, with a number in the place of a target. `latency` is there where one is needed."""

    vlm: VLM
    compression: Compression
    latency: tuple[Latency, ...] = ()

    @staticmethod
    def of(vlm: VLM, compression: Compression, memory: Memory) -> "Fit":
        """Measures this machine where a target asks for it and nobody did before; see `mmsdk.latency.latency_of`."""
        return Fit(vlm, compression, (latency_of(vlm, memory),) if compression.aimed else ())

    def __call__(self, prompts: Mapping[int, Prompt]) -> dict[int, Compression | MmsdkError]:
        """The plan of each row; a target that a row cannot meet, and an input that cannot be seen, is that row's error."""
        if not self.compression.aimed:
            return dict.fromkeys(prompts, self.compression)
        return {index: self._row(index, prompt) for index, prompt in prompts.items()}

    def _row(self, index: int, prompt: Prompt) -> Compression | MmsdkError:
        try:
            return self._fitted(prompt.media, self.vlm.layout(prompt).fixed)
        except InputError as error:
            return error.at(index)

    def _fitted(self, media: Sequence[Media | Encoded], words: int) -> Compression:
        full = [_count(self.vlm, item) for item in media]
        (place,), steps = self.compression.aimed, self.compression.steps
        target = steps[place].amount
        assert isinstance(target, Target), "the aimed step is the one with a target"
        given = _through(steps[:place], full)

        def plan(count: int) -> Compression:
            return _with(self.compression, place, _amount(count, given))

        def ms(count: int) -> float:
            return self._ms(plan(count), full, words)

        def possible(count: int) -> bool:
            # later steps want what they ask for, of the smallest input too, and a method inside the encoder something of each frame
            try:
                lengths(plan(count), full, words, self.vlm.decoder.config.layers)
                _shortened(self.vlm, plan(count), media)
            except BudgetError:
                return False
            return True

        if not full:
            return plan(1)
        most = max(given)
        # what fits with few tokens fits with more
        least = next(iter(_from(possible, most)), most)
        if ms(least) > target.ms:
            raise BudgetError(self._told(target, words, ms(least), len(full)))
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if ms(middle) <= target.ms else (least, middle - 1)
        return plan(least)

    def _ms(self, plan: Compression, full: Sequence[int], words: int) -> float:
        """Predicted milliseconds of a row: of layers that see fewer tokens each as much of a whole prefill of so many tokens."""
        (latency,) = self.latency
        seen = lengths(plan, full, words, self.vlm.decoder.config.layers)
        return sum(latency(length) for length in seen) / len(seen)

    def _told(self, target: Target, words: int, least: float, media: int) -> str:
        sight = "1 input" if media == 1 else f"{media} inputs"
        return (
            f"prefill<{target.ms:g}ms cannot be met: the {words} tokens of words and the fewest visual tokens of {sight} take about "
            f"{least:.3g} ms on this machine; allow more time or ask more shortly"
        )


def lengths(plan: Compression, full: Sequence[int], words: int, depth: int) -> list[int]:
    """How many tokens of a prompt each of the decoder's layers sees, of inputs of `full` tokens each and so many tokens of words.

    Raises BudgetError where an amount does not fit.
    """
    counts = _through([step for step in plan.steps if not isinstance(step.method, Thinner)], full)
    seen = [words + sum(counts)] * depth
    for step in plan.inside_decoder:
        budgets = [step.budget(count) for count in counts]
        entered = [_entering(step.method, *one) for one in zip(counts, budgets, strict=True)]
        left = [step.method.counts(*one) for one in zip(entered, budgets, strict=True)]
        seen = [words + sum(entered)] * depth
        for stage, layer in enumerate(step.method.layers(depth)):
            seen[layer:] = [words + sum(one[stage] for one in left)] * (depth - layer)
    return seen


def by_plan(
    plans: Mapping[int, Compression],
    rows: Mapping[int, T],
    part: Callable[[Compression], Compression],
    work: Callable[[Compression, Mapping[int, T]], dict[int, R]],
) -> dict[int, R]:
    """Work on rows, those together whose plans agree in the part that matters here."""
    groups: dict[tuple[object, ...], dict[int, T]] = defaultdict(dict)
    for index, row in rows.items():
        groups[tuple(step.amount for step in part(plans[index]).steps)][index] = row
    found: dict[int, R] = {}
    for members in groups.values():
        found |= work(part(plans[next(iter(members))]), members)
    return {index: found[index] for index in rows}


def inside_encoder(plan: Compression) -> Compression:
    """The part of a plan that shortens the encoder."""
    return Compression(plan.inside_encoder)


def before(plan: Compression) -> Compression:
    """The part that needs no projector."""
    return plan.before


def behind(plan: Compression) -> Compression:
    """The part from the projector on."""
    return plan.behind


def _through(steps: Sequence[Step[Method]], full: Sequence[int]) -> list[int]:
    """What is left of inputs after these steps."""
    counts = list(full)
    for step in steps:
        counts = [step.budget(count).count for count in counts]
    return counts


def _from(holds: Callable[[int], bool], most: int) -> range:
    """The counts up to `most` from the least that holds, of what holds for all larger ones too; none where it does not for `most`."""
    return range(bisect.bisect_left(range(1, most + 1), True, key=holds) + 1, most + 1)


def _shortened(vlm: VLM, plan: Compression, media: Sequence[Media | Encoded]) -> None:
    """Raises BudgetError where the method inside the encoder cannot come to a plan's count."""
    encoder = vlm.encoder
    for step in plan.inside_encoder:
        for item in media:
            if isinstance(item, Encoded):
                continue
            count, frames = step.budget(_count(vlm, item)).count, len(item.frames) if isinstance(item, Video) else 1
            if count == _count(vlm, item):
                continue
            if isinstance(step.method, Shortener) and isinstance(encoder, ShorteningEncoder):
                encoder.plan(item.size, frames, step.method, count)
            elif isinstance(step.method, Pruner) and isinstance(encoder, PruningEncoder):
                encoder.prunings(item.size, frames, step.method, count, True)


def _with(compression: Compression, place: int, amount: int | float) -> Compression:
    steps = list(compression.steps)
    steps[place] = dataclasses.replace(steps[place], amount=amount)
    return dataclasses.replace(compression, steps=tuple(steps))


def _amount(count: int, given: Sequence[int]) -> int | float:
    """So many tokens of the largest input, and of the others the same share of theirs."""
    return count if len(set(given)) == 1 else count / max(given, default=count)


def _entering(method: Thinner, count: int, budget: Budget) -> int:
    """How many tokens of an input go into the decoder, which a method tells by choosing among any."""
    blank = torch.zeros(count, 1)
    positions = torch.stack([torch.zeros(count), torch.zeros(count), torch.arange(count)], dim=1).long()
    tokens = VisualTokens(blank, positions, torch.ones(count), (1, 1, count), torch.zeros(1), blank[:, 0])
    (entered,) = method.enter([tokens], [budget])
    return len(entered.tokens)


def _count(vlm: VLM, item: Media | Encoded) -> int:
    if isinstance(item, Encoded):
        return len(item)
    return vlm.encoder.count(item.size, len(item.frames) if isinstance(item, Video) else 1)
