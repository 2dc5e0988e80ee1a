"""What a user asks to keep ("uniform:64", "random:0.25,seed=3", a list of them) as steps that run in order, each at its stage.

    compress=["tome:0.5", "simplecluster:0.2", "fastv:0.5"]

The stages follow the data: one step inside the encoder, any number between encoder and decoder, one inside the decoder. Which stage a
method belongs to is told by its protocol (`mmsdk.tokencomp.types`). Every amount is of what the step before it left.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mmsdk import plugins
from mmsdk.errors import BudgetError, PluginError
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.identity import Identity
from mmsdk.tokencomp.plan import untouched
from mmsdk.tokencomp.types import Compressed, Compressor, Thinner
from mmsdk.vision.shorten import Shortener
from mmsdk.vision.types import VisualTokens

__all__ = ["METHODS", "Compression", "CompressionSpec", "Entering", "Method", "Step", "compression", "named"]

METHODS = "mmsdk.tokencomp.methods"

Method = Shortener | Compressor | Thinner
M_co = TypeVar("M_co", bound=Method, covariant=True)


@dataclass(frozen=True, slots=True)
class Step(Generic[M_co]):
    """A method and how much it may keep of each visual input: a count (int) or a fraction (float)."""

    method: M_co
    amount: int | float


@dataclass(frozen=True, slots=True)
class Entering:
    """A visual input as it goes into the decoder, and how many of its tokens are left there after each cut."""

    compressed: Compressed
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compression:
    """Steps in order, each working on what the one before it left. No step at all keeps everything.

    Raises PluginError for steps out of the order of their stages, and for two inside the encoder or inside the decoder.
    """

    steps: tuple[Step[Method], ...] = ()

    def __post_init__(self) -> None:
        stages = [_stage(step.method) for step in self.steps]
        asked = ", ".join(f"{named(step.method)} ({stage})" for step, stage in zip(self.steps, stages, strict=True))
        if stages != sorted(stages, key=_STAGES.index):
            raise PluginError(f"compression steps run {', then '.join(_STAGES)}; put {asked} in this order")
        for stage in ("encoder", "decoder"):
            if stages.count(stage) > 1:
                raise PluginError(f"only one method can work inside the {stage}, not all of {asked}")

    @property
    def inside_encoder(self) -> tuple[Step[Shortener], ...]:
        """The step that shortens the encoder, if there is one."""
        return tuple(Step(step.method, step.amount) for step in self.steps if isinstance(step.method, Shortener))

    @property
    def inside_decoder(self) -> tuple[Step[Thinner], ...]:
        """The step that thins inside the decoder, if there is one."""
        return tuple(Step(step.method, step.amount) for step in self.steps if isinstance(step.method, Thinner))

    def __call__(self, tokens: Sequence[VisualTokens]) -> list[Compressed]:
        """Take a batch of visual inputs through the steps between encoder and decoder; each meets each step's budget by itself.

        Raises BudgetError where an amount does not fit an input.
        """
        result = [untouched(item) for item in tokens]
        for step in self.steps:
            if isinstance(step.method, Compressor):
                sources = [item.tokens for item in result]
                shorter = step.method(sources, [Budget.of(step.amount, len(item)) for item in sources])
                result = [_joined(before, after) for before, after in zip(result, shorter, strict=True)]
        return result

    def entering(self, tokens: Sequence[VisualTokens]) -> list[Entering]:
        """What of a batch of visual inputs goes into the decoder, by the steps between and by the one inside it.

        Raises BudgetError where an amount does not fit an input, InputError where a method lacks what it scores by.
        """
        result = [Entering(item, ()) for item in self(tokens)]
        for step in self.inside_decoder:
            sources = [item.compressed.tokens for item in result]
            budgets = [Budget.of(step.amount, len(item)) for item in sources]
            entered = step.method.enter(sources, budgets)
            counts = [step.method.counts(len(item.tokens), budget) for item, budget in zip(entered, budgets, strict=True)]
            result = [
                Entering(_joined(before.compressed, after), left) for before, after, left in zip(result, entered, counts, strict=True)
            ]
        return result


CompressionSpec = str | Step[Method] | Compression | Sequence[str | Step[Method]]
"""What a user may write: a method with its amount, steps, or a list of either."""

_STAGES = ("encoder", "projector", "decoder")


def compression(spec: CompressionSpec) -> Compression:
    """Read what a user asks for.

    Raises PluginError for an unknown method or knob and for steps out of order, BudgetError for an amount that is no number or impossible
    for any input.
    """
    if isinstance(spec, Compression):
        return spec
    return Compression(tuple(_step(part) for part in ([spec] if isinstance(spec, str | Step) else spec)))


def named(method: Method) -> str:
    """The name of a method in messages and audits."""
    return type(method).__name__.lower()


def _stage(method: Method) -> str:
    return "encoder" if isinstance(method, Shortener) else "decoder" if isinstance(method, Thinner) else "projector"


def _step(part: str | Step[Method]) -> Step[Method]:
    if isinstance(part, Step):
        return part
    asked = plugins.parse(part)
    method = plugins.build(METHODS, asked)
    if not isinstance(method, Shortener | Compressor | Thinner):
        raise PluginError(f"{asked.name!r} in {METHODS} is no compressor")
    if not asked.amount and not isinstance(method, Identity):
        raise BudgetError(f'{part!r} does not say how much to keep: write "{asked.name}:64" for a count or "{asked.name}:0.25" for a share')
    return Step(method, _amount(asked.amount or "1.0", part))


def _amount(text: str, part: str) -> int | float:
    try:
        amount = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise BudgetError(f"{part!r}: the amount {text!r} is no number; write a count such as 64 or a share such as 0.25") from None
    # an amount that no input could meet is refused here, before any weights are loaded
    Budget.of(amount, max(1, amount) if isinstance(amount, int) else 1)
    return amount


def _joined(before: Compressed, after: Compressed) -> Compressed:
    return dataclasses.replace(after, audit=compose(before.audit, after.audit))
