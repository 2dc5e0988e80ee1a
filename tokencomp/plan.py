"""Plan, then apply: a method finds indices once, and they are applied to features, positions, weights, scores and deep features alike.

A method calls `keep` (pruning: which tokens stay) or `merge` (which group each token joins); both return the surviving tokens in
reading order together with the audit.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError, InputError
from mmsdk.kernels.ops.assign_and_merge import weighted_merge
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.types import Audit, Compressed
from mmsdk.vision.types import VisualTokens

__all__ = ["check", "keep", "merge", "reading_key", "untouched"]


def check(tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Tensor] | None = None) -> None:
    """Refuse a batch whose budgets cannot be met exactly, or whose questions are not one for each input; every method calls this first.

    Raises BudgetError naming the item, and InputError for the questions.
    """
    if query is not None and len(query) != len(tokens):
        raise InputError(f"{len(tokens)} visual inputs came with the questions of {len(query)}; give one for each input", item="query")
    if len(tokens) != len(budgets):
        raise BudgetError(f"{len(tokens)} visual inputs came with {len(budgets)} budgets; give one budget per input")
    for i, (item, budget) in enumerate(zip(tokens, budgets, strict=True)):
        if budget.count > len(item):
            raise BudgetError(f"budget {budget.count} is above the {len(item)} visual tokens of the input", index=i)


def reading_key(positions: Int[Tensor, "n 3"], grid: tuple[int, int, int]) -> Int[Tensor, " n"]:
    """One integer per token that sorts by time, then row, then column."""
    _, rows, columns = grid
    t, y, x = positions.unbind(dim=1)
    return (t * rows + y) * columns + x


def untouched(tokens: VisualTokens) -> Compressed:
    """Every token stays. Its audit's method is "identity", which leaves no trace in a chain."""
    device = tokens.features.device
    return Compressed(tokens, Audit("identity", torch.arange(len(tokens), device=device), torch.zeros(len(tokens), device=device)))


def keep(
    tokens: VisualTokens,
    index: Int[Tensor, " k"],
    *,
    method: str,
    scores: Float[Tensor, " n"] | None = None,
    seconds: float = 0.0,
) -> Compressed:
    """Keep the tokens at `index` (distinct, any order) exactly as they are and drop the others."""
    index = index.sort().values
    assignment = torch.full((len(tokens),), -1, dtype=torch.int64, device=index.device)
    assignment[index] = torch.arange(index.shape[0], device=index.device)
    kept = dataclasses.replace(
        tokens,
        features=tokens.features[index],
        positions=tokens.positions[index],
        weight=tokens.weight[index],
        saliency=tokens.saliency[index] if tokens.saliency.shape[0] else tokens.saliency,
        keys=None if tokens.keys is None else tokens.keys[index],
        deep=tuple(features[index] for features in tokens.deep),
    )
    return Compressed(kept, Audit(method, assignment, _scores(tokens, scores), seconds))


def merge(
    tokens: VisualTokens,
    labels: Int[Tensor, " n"],
    count: int,
    *,
    method: str,
    scores: Float[Tensor, " n"] | None = None,
    seconds: float = 0.0,
    at: Int[Tensor, " k"] | None = None,
    features: Float[Tensor, "k d"] | None = None,
) -> Compressed:
    """Merge each group of tokens into its mean, weighted by the patches that each member stands for.

    `labels` gives the group of every token in [0, count), every group non-empty, or -1 to drop the token. Sums run in float32; the
    position of a group is the rounded weighted mean of its members' (halves round up), and groups come out in reading order.

    A method whose paper says otherwise gives, by group, `at`, the source token whose position the group takes, and `features`, what the
    group becomes instead of the mean (float32, held within the range of the tokens' dtype).
    """

    def grouped(values: Tensor) -> tuple[Tensor, Tensor]:
        means, totals = weighted_merge(values[None], labels[None], count, tokens.weight[None])
        return means[0], totals[0]

    def mean(values: Tensor) -> Tensor:
        return grouped(values)[0]

    centres, total = grouped(tokens.positions.float())
    positions = (centres + 0.5).floor().to(tokens.positions.dtype) if at is None else tokens.positions[at]
    merged_features = mean(tokens.features) if features is None else _within(features, tokens.features.dtype)
    order = reading_key(positions, tokens.grid).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count, device=order.device)
    merged = dataclasses.replace(
        tokens,
        features=merged_features[order].to(tokens.features.dtype),
        positions=positions[order],
        weight=total[order].to(tokens.weight.dtype),
        saliency=_mean_saliency(tokens, mean, order),
        keys=None if tokens.keys is None else mean(tokens.keys)[order].to(tokens.keys.dtype),
        deep=tuple(mean(part)[order].to(part.dtype) for part in tokens.deep),
    )
    assignment = rank[labels.clamp_min(0)].masked_fill(labels < 0, -1)
    return Compressed(merged, Audit(method, assignment, _scores(tokens, scores), seconds))


def _mean_saliency(tokens: VisualTokens, mean: Callable[[Tensor], Tensor], order: Tensor) -> Tensor:
    if tokens.saliency.shape[0] == 0:
        return tokens.saliency
    return mean(tokens.saliency[:, None])[order, 0].to(tokens.saliency.dtype)


def _within(features: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return features.clamp(-limit, limit)


def _scores(tokens: VisualTokens, scores: Tensor | None) -> Tensor:
    return torch.zeros(len(tokens), device=tokens.features.device) if scores is None else scores
