"""The compress stage: what a user writes ("uniform:64", "random:0.25,seed=3", a list of them) as steps that run in order."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmsdk import plugins
from mmsdk.errors import BudgetError, PluginError
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.identity import Identity
from mmsdk.tokencomp.types import Compressed, Compressor
from mmsdk.vision.types import VisualTokens

__all__ = ["METHODS", "Compression", "CompressionSpec", "Step", "compression"]

METHODS = "mmsdk.tokencomp.methods"


@dataclass(frozen=True, slots=True)
class Step:
    """A method and how much it may keep of each visual input: a count (int) or a fraction (float)."""

    method: Compressor
    amount: int | float


@dataclass(frozen=True, slots=True)
class Compression:
    """Steps in order, each working on what the one before it left. No step at all keeps everything."""

    steps: tuple[Step, ...] = ()

    def __call__(self, tokens: Sequence[VisualTokens]) -> list[Compressed]:
        """Compress a batch of visual inputs; each meets each step's budget by itself.

        Raises BudgetError where an amount does not fit an input.
        """
        result = Identity()(tokens, [Budget(len(item)) for item in tokens])
        for step in self.steps:
            sources = [item.tokens for item in result]
            shorter = step.method(sources, [Budget.of(step.amount, len(item)) for item in sources])
            result = [_joined(before, after) for before, after in zip(result, shorter, strict=True)]
        return result


CompressionSpec = str | Step | Compression | Sequence[str | Step]
"""What a user may write: a method with its amount, steps, or a list of either."""


def compression(spec: CompressionSpec) -> Compression:
    """Read what a user asks for.

    Raises PluginError for an unknown method or knob, BudgetError for an amount that is no number or impossible for any input.
    """
    if isinstance(spec, Compression):
        return spec
    return Compression(tuple(_step(part) for part in ([spec] if isinstance(spec, str | Step) else spec)))


def _step(part: str | Step) -> Step:
    if isinstance(part, Step):
        return part
    asked = plugins.parse(part)
    method = plugins.build(METHODS, asked)
    if not isinstance(method, Compressor):
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
    audit = after.audit if before.audit.method == "identity" else compose(before.audit, after.audit)
    return dataclasses.replace(after, audit=audit)
