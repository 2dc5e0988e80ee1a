"""What a user asks to keep ("uniform:64", "random:0.25,seed=3", a list of them) as steps that run in order, each at its stage.

    compress=["tome:0.5", "simplecluster:0.2", "fastv:0.5"]
    compress=["simplecluster:0.1", "proportional"]

The stages follow the data: one step inside the encoder, any number on its features, any number on the embeddings that the projector
makes of them, one inside the decoder. Which stage a method belongs to is told by its protocol and, for the two in the middle, by the side
of the projector that it declares (`mmsdk.tokencomp.types`). Every amount is of what the step before it left.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk import plugins
from mmsdk.errors import BudgetError, InputError, PluginError
from mmsdk.target import AUTO, Target
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.braco import Braco
from mmsdk.tokencomp.methods.identity import Identity
from mmsdk.tokencomp.plan import reading_key, untouched
from mmsdk.tokencomp.types import Compressed, Compressor, Side, Thinner
from mmsdk.vision.prune import Pruner
from mmsdk.vision.shorten import Shortener
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import brief

__all__ = ["METHODS", "PROPORTIONAL", "Compression", "CompressionSpec", "Entering", "Method", "Step", "compression", "named"]

METHODS = "mmsdk.tokencomp.methods"
PROPORTIONAL = "proportional"
# What stands before an amount where a count is the most that stays ("uniform:most@64").
MOST = "most@"

Method = Shortener | Pruner | Compressor | Thinner
M_co = TypeVar("M_co", bound=Method, covariant=True)


@dataclass(frozen=True, slots=True)
class Step(Generic[M_co]):
    """A method and how much it may keep of each visual input: a count (int), a fraction (float), or what a target has time for.

    "adaptive", which a `Pruner` alone can be, is as many as it finds right for each input. Where `most`, a count is what stays at most: of
    an input that has fewer tokens all of them, and no error; it is written "uniform:most@64".
    """

    method: M_co
    amount: int | float | Target | Literal["adaptive"]
    most: bool = False

    def budget(self, n: int) -> Budget:
        """The count of n tokens that may stay, of an adaptive step the most: all. Raises BudgetError where the amount does not fit, or is
        still a target."""
        if self.amount == "adaptive":
            return Budget(n)
        if isinstance(self.amount, Target):
            raise BudgetError(f"a prefill of {self.amount.ms:g} ms is no number of tokens; a pipeline makes it one (mmsdk.fitting)")
        return Budget.of(min(self.amount, n) if self.most and isinstance(self.amount, int) else self.amount, n)


@dataclass(frozen=True, slots=True)
class Entering:
    """A visual input as it goes into the decoder, and how many of its tokens are left there after each cut.

    Positions count `counted` tokens of it, of which those at `places`, ascending, go in: all, unless the step inside the decoder has the
    others keep their positions. `cells` are the cells of the grid that the counted ones stand in.
    """

    compressed: Compressed
    counts: tuple[int, ...]
    counted: int
    places: Int[Tensor, " m"]
    cells: Int[Tensor, " c"]

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True, slots=True)
class Compression:
    """Steps in order, each working on what the one before it left. No step at all keeps everything.

    `proportional` lets visual tokens count in the language model's attention as those that there were: where m of n go in, each as n / m.

    Raises PluginError for steps out of the order of their stages, and for two inside the encoder or inside the decoder, BudgetError for
    two whose amount is a target, or one after an adaptive one, InputError for a target of a coder that does not take any count.
    """

    steps: tuple[Step[Method], ...] = ()
    proportional: bool = False

    def __post_init__(self) -> None:
        stages = [_stages(step.method) for step in self.steps]
        asked = ", ".join(f"{named(step.method)} ({_STAGES[earliest]})" for step, (earliest, _) in zip(self.steps, stages, strict=True))
        reached = accumulate((earliest for earliest, _ in stages), max)
        if any(stage > latest for stage, (_, latest) in zip(reached, stages, strict=True)):
            raise PluginError(f"compression steps run {', then '.join(_STAGES)}; put {asked} in this order")
        for stage, steps in (("encoder", self.inside_encoder), ("decoder", self.inside_decoder)):
            if len(steps) > 1:
                raise PluginError(f"only one method can work inside the {stage}, not all of {asked}")
        if len(self.aimed) > 1:
            raise BudgetError(f"only one step can be fitted to a time, not {len(self.aimed)} of {asked}")
        if self.aimed and any(step.amount == "adaptive" for step in self.steps):
            raise BudgetError(f"a step is fitted to a time by counts known beforehand; give each of {asked} an amount, such as 0.5")
        if not all(_any_count(self.steps[place].method) for place in self.aimed):
            raise InputError(
                "a coder, basis=pca or span=frame does not take any count, so that no time can be fitted; give a count, or leave it out",
                item=named(self.steps[self.aimed[0]].method),
            )
        if self.proportional and any(step.method.positions == "compact" for step in self.inside_decoder):
            raise PluginError(f"{PROPORTIONAL} needs tokens that keep their positions; write positions=keep behind the amount in {asked}")

    @property
    def inside_encoder(self) -> tuple[Step[Shortener | Pruner], ...]:
        """The step that shortens the encoder, if there is one."""
        return tuple(Step(step.method, step.amount, step.most) for step in self.steps if isinstance(step.method, Shortener | Pruner))

    @property
    def inside_decoder(self) -> tuple[Step[Thinner], ...]:
        """The step that thins inside the decoder, if there is one."""
        return tuple(Step(step.method, step.amount, step.most) for step in self.steps if isinstance(step.method, Thinner))

    @property
    def before(self) -> "Compression":
        """The steps that need no projector: up to the first that works behind it or inside the decoder."""
        return Compression(self.steps[: self._turn])

    @property
    def behind(self) -> "Compression":
        """The steps from there on, which are given the language model's embeddings."""
        return Compression(self.steps[self._turn :])

    @property
    def aimed(self) -> tuple[int, ...]:
        """The place of the step whose amount is a target, if there is one."""
        return tuple(place for place, step in enumerate(self.steps) if isinstance(step.amount, Target))

    @property
    def asks(self) -> bool:
        """Whether any step wants to know the question."""
        return any(isinstance(step.method, Compressor) and step.method.asks for step in self.steps)

    def at_most(self) -> "Compression":
        """The same where every count is the most that stays, so that an input with fewer tokens keeps all of them."""
        return Compression(tuple(dataclasses.replace(step, most=True) for step in self.steps), self.proportional)

    def __call__(self, tokens: Sequence[VisualTokens], query: Sequence[Float[Tensor, "_ d"]] | None = None) -> list[Compressed]:
        """Take a batch of visual inputs through the steps between encoder and decoder; each meets each step's budget by itself.

        `query` are the embeddings of what each input is asked about, for the steps that ask. Raises BudgetError where an amount does not
        fit an input, InputError where a method lacks what it scores by.
        """
        result = [untouched(item) for item in tokens]
        for step in self.steps:
            if isinstance(step.method, Compressor):
                sources = [item.tokens for item in result]
                budgets = [step.budget(len(item)) for item in sources]
                shorter = step.method(sources, budgets, query if step.method.asks else None)
                result = [_joined(before, after) for before, after in zip(result, shorter, strict=True)]
        return result

    def entering(self, tokens: Sequence[VisualTokens], query: Sequence[Float[Tensor, "_ d"]] | None = None) -> list[Entering]:
        """What of a batch of visual inputs goes into the decoder, by the steps between and by the one inside it; raises as they do."""
        between = self(tokens, query)
        if not self.inside_decoder:
            return [_whole(item) for item in between]
        (step,) = self.inside_decoder
        sources = [item.tokens for item in between]
        budgets = [step.budget(len(item)) for item in sources]
        entered = step.method.enter(sources, budgets)
        return [_entering(step.method, *one) for one in zip(between, entered, budgets, strict=True)]

    @property
    def spec(self) -> str | list[str]:
        """What a user writes for it: "uniform:64", or a list of such strings, with knobs where they are not the usual ones."""
        told = [_written(step) for step in self.steps] + [PROPORTIONAL] * self.proportional
        return told[0] if len(told) == 1 else told or "identity"

    @property
    def _turn(self) -> int:
        """How many steps come before the projector."""
        needs = [min(_stages(step.method)) >= _STAGES.index("projector") for step in self.steps]
        return [*needs, True].index(True)


CompressionSpec = str | Step[Method] | Compression | Sequence[str | Step[Method]]
"""What a user may write: a method with its amount, steps, or a list of either."""

_STAGES = ("encoder", "features", "projector", "decoder")
_SIDES: Mapping[Side, tuple[int, int]] = MappingProxyType({"before": (1, 1), "behind": (2, 2), "either": (1, 2)})


def compression(spec: CompressionSpec) -> Compression:
    """Read what a user asks for: steps, and among them, anywhere, perhaps the word "proportional" (see `Compression`).

    Raises PluginError for an unknown method or knob and for steps out of order, BudgetError for an amount that is no number or impossible
    for any input.
    """
    if isinstance(spec, Compression):
        return spec
    parts = list(spec) if isinstance(spec, list | tuple) else [spec]
    steps = tuple(_step(part) for part in parts if not (isinstance(part, str) and part == PROPORTIONAL))
    return Compression(steps, proportional=len(steps) < len(parts))


def _any_count(method: Method) -> bool:
    return not isinstance(method, Braco) or (method.coder == "none" and method.span == "clip" and method.basis != "pca")


def named(method: Method) -> str:
    """The name of a method in messages and audits."""
    return type(method).__name__.lower()


def _stages(method: Method) -> tuple[int, int]:
    """The first and the last of the stages that a method can work at."""
    return (0, 0) if isinstance(method, Shortener | Pruner) else (3, 3) if isinstance(method, Thinner) else _SIDES[method.side]


def _step(part: object) -> Step[Method]:
    if isinstance(part, Step):
        return part
    if not isinstance(part, str):
        raise PluginError(f'{part!r:.60} names no method; write compress="uniform:64", or a list of such strings')
    asked = plugins.parse(part)
    for knob, value in asked.knobs:
        # a target written with <= reads like a knob
        if knob.startswith(AUTO + "@"):
            Target.parse(f"{knob}={value}")
    method = plugins.build(METHODS, asked)
    if not isinstance(method, Shortener | Pruner | Compressor | Thinner):
        raise PluginError(f"{asked.name!r} in {METHODS} is no compressor: it fulfils none of the protocols of the stages")
    text, most = asked.amount.removeprefix(MOST), asked.amount.startswith(MOST)
    if isinstance(method, Pruner) and text in ("", "adaptive"):
        return Step(method, "adaptive", most)
    if not text and not isinstance(method, Identity):
        raise BudgetError(f'{part!r} does not say how much to keep: write "{asked.name}:64" for a count or "{asked.name}:0.25" for a share')
    return Step(method, _amount(text or "1.0", part), most)


def _amount(text: str, part: str) -> int | float | Target:
    if text.startswith(AUTO):
        return Target.parse(text)
    try:
        amount = plugins.number(int if re.fullmatch(r"[+-]?[0-9]+", text) else float, text)
    except ValueError:
        raise BudgetError(f"{part!r}: the amount {text!r} is no number; write a count such as 64 or a share such as 0.25") from None
    # an amount that no input could meet is refused here, before any weights are loaded
    Budget.of(amount, max(1, amount) if isinstance(amount, int) else 1)
    return amount


def _written(step: Step[Method]) -> str:
    """A step as it is written, of a method that is no dataclass by its name alone."""
    method, amount = step.method, step.amount
    if isinstance(method, Identity) and amount == 1.0 and not step.most:
        return named(method)
    # every digit of a time, without the point of a whole number
    how = f"{AUTO}@prefill<{str(float(amount.ms)).removesuffix('.0')}ms" if isinstance(amount, Target) else str(amount)
    return f"{named(method)}:{','.join([MOST * step.most + how, *_knobs(method)])}"


def _knobs(method: object) -> list[str]:
    """The knobs of a method that are not the usual ones, each as it is written."""
    known = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return [f"{one.name}={getattr(method, one.name)}" for one in known if one.init and getattr(method, one.name) != one.default]


def _joined(before: Compressed, after: Compressed) -> Compressed:
    return dataclasses.replace(after, audit=compose(before.audit, after.audit))


def _whole(item: Compressed) -> Entering:
    m, cells = len(item.tokens), reading_key(item.tokens.positions, item.tokens.grid)
    return Entering(item, (), m, torch.arange(m, device=cells.device), cells)


def _entering(method: Thinner, between: Compressed, entered: Compressed, budget: Budget) -> Entering:
    m, assignment = len(entered.tokens), entered.audit.assignment
    whole = _whole(_joined(between, entered))
    if method.positions == "keep":
        # those that enter are numbered in their order, and all others are -1: the places of the former end up last
        places, before = assignment.argsort(stable=True)[len(assignment) - m :], _whole(between)
        whole = dataclasses.replace(whole, counted=before.counted, places=places, cells=before.cells)
    return dataclasses.replace(whole, counts=method.counts(m, budget))
