"""VisionZip, PruMerge and VisPruner: methods scored by the encoder's attention, each against loops written from its rules."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmsdk.errors import InputError, PluginError
from mmsdk.kernels.cpu.library import library
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods import vispruner
from mmsdk.tokencomp.methods.prumerge import PruMerge
from mmsdk.tokencomp.methods.visionzip import VisionZip
from mmsdk.tokencomp.methods.vispruner import VisPruner
from mmsdk.tokencomp.types import Compressed
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]


class Called(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.double(), b.double()) / (a.double().norm() * b.double().norm()))


def most(scores: Tensor, count: int, among: list[int]) -> list[int]:
    return sorted(sorted(among, key=lambda i: -float(scores[i]))[:count])


def equally_weighted(source: VisualTokens) -> VisualTokens:
    return dataclasses.replace(source, weight=torch.full_like(source.weight, 4.0))


def by_token(result: Compressed, count: int) -> list[list[int]]:
    """The members of each surviving token."""
    assignment = result.audit.assignment.tolist()
    return [[i for i, slot in enumerate(assignment) if slot == group] for group in range(count)]


@pytest.mark.parametrize(("m", "contextual"), [(192, 30), (128, 20), (64, 10)])
def test_visionzip_has_the_published_shares(tokens_of: Tokens, m: int, contextual: int) -> None:
    source = tokens_of((1, 24, 24), seed=m)
    (result,) = VisionZip()([source], [Budget(m)])
    sizes = [len(members) for members in by_token(result, m)]
    dominant = set(most(source.saliency, m - contextual, list(range(576))))
    assert len(dominant & {members[0] for members in by_token(result, m) if len(members) == 1}) == m - contextual
    assert sum(sizes) == 576


@pytest.mark.parametrize("m", [1, 7, 13, 29])
def test_visionzip_equals_its_rules(tokens_of: Tokens, m: int) -> None:
    source = equally_weighted(tokens_of((1, 5, 6), seed=m))
    assert source.keys is not None
    contextual = max(1, round(m * 10 / 64))
    dominant = most(source.saliency, m - contextual, list(range(30)))
    rest = [i for i in range(30) if i not in dominant]
    targets = rest[:: len(rest) // contextual][:contextual]
    joined: dict[int, list[int]] = {t: [] for t in targets}
    for i in rest:
        if i not in targets:
            joined[max(targets, key=lambda t: cosine(source.keys[i], source.keys[t]))].append(i)
    expected = {i: source.features[i].double() for i in dominant}
    for t, members in joined.items():
        mean = source.features[members].double().mean(dim=0) if members else 0.0
        expected[t] = source.features[t].double() + mean
    (result,) = VisionZip()([source], [Budget(m)])
    assert torch.equal(result.tokens.positions, source.positions[sorted(expected)])
    torch.testing.assert_close(result.tokens.features.double(), torch.stack([expected[i] for i in sorted(expected)]), rtol=1e-5, atol=1e-5)
    assert torch.equal(result.tokens.features[[sorted(expected).index(i) for i in dominant]], source.features[dominant])
    assert float(result.tokens.weight.sum()) == float(source.weight.sum())


@pytest.mark.parametrize(("m", "uniform"), [(1, 0.0), (2, 0.0), (9, 0.0), (38, 0.0), (13, 0.5)])
def test_prumerge_equals_its_rules(tokens_of: Tokens, m: int, uniform: float) -> None:
    source = tokens_of((1, 5, 8), seed=m)
    keys, attention, x = source.keys, source.saliency.double(), source.features.double()
    assert keys is not None
    room = max(1, m - 1)
    samples = int(room * uniform)
    spaced = [(2 * i + 1) * 40 // (2 * samples) for i in range(samples)]
    kept = sorted(spaced + most(attention, room - samples, [i for i in range(40) if i not in spaced]))
    expected = {}
    for i in kept:
        near = sorted((j for j in range(40) if j != i), key=lambda j: -cosine(keys[i], keys[j]))[:32]
        expected[i] = x[i] + sum(attention[j] * x[j] for j in near)
    pruned = [i for i in range(40) if i not in kept]
    if m > 1:
        expected[most(attention, 1, pruned)[0]] = sum(attention[j] * x[j] for j in pruned)
    (result,) = PruMerge(uniform=uniform)([source], [Budget(m)])
    assert torch.equal(result.tokens.positions, source.positions[sorted(expected)])
    torch.testing.assert_close(result.tokens.features.double(), torch.stack([expected[i] for i in sorted(expected)]), rtol=1e-4, atol=1e-4)
    assert float(result.tokens.weight.sum()) == float(source.weight.sum())


@pytest.mark.parametrize(
    ("m", "n", "share"), [(1, 45, "0.5"), (2, 45, "0.5"), (10, 45, "0.5"), (31, 45, "0.5"), (44, 45, "0.5"), (100, 101, "0.29")]
)
def test_vispruner_equals_its_rules(tokens_of: Tokens, m: int, n: int, share: str) -> None:
    """Half of the budget, rounded down, by attention; and a share that a float product falls short of."""
    source = tokens_of((1, 1, n), seed=m)
    important = most(source.saliency, math.floor(Fraction(share) * m), list(range(n)))
    rest = [i for i in range(n) if i not in important]
    while len(rest) > m - len(important):
        even, odd = rest[::2], rest[1::2]
        twins = {i: max(cosine(source.features[i], source.features[j]) for j in odd) for i in even}
        gone = sorted(even, key=lambda i: -twins[i])[: min(8, len(rest) - (m - len(important)))]
        rest = [i for i in rest if i not in gone]
    (result,) = VisPruner(important=float(share))([source], [Budget(m)])
    assert torch.equal(result.tokens.features, source.features[sorted(important + rest)])


def test_vispruner_by_slices_equals_vispruner_by_pairs(tokens_of: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pairs of one input are too many to be held until some have gone, and those of several together."""
    sources = [tokens_of((1, 6, 15), seed=seed) for seed in range(3)]
    for m in (1, 7, 50, 80):
        plain = VisPruner()(sources, [Budget(m)] * 3)
        with monkeypatch.context() as patch:
            patch.setattr(vispruner, "few", lambda b, n: n <= 60)
            patch.setattr(vispruner, "ENTRIES", 2 * 60 * 60)
            sliced = VisPruner()(sources, [Budget(m)] * 3)
        assert all(torch.equal(a.audit.assignment, b.audit.assignment) for a, b in zip(plain, sliced, strict=True))


@pytest.mark.skipif(library().functions is None, reason=library().state)
def test_vispruner_calls_torch_as_often_for_many_tokens_as_for_few(tokens_of: Tokens) -> None:
    """Its rounds, of which there are more the more tokens there are, are one call."""
    calls = []
    for n in (60, 300):
        with Called() as called:
            VisPruner()([tokens_of((1, 1, n), seed=seed) for seed in (0, 1)], [Budget(6)] * 2)
        calls.append(called.count)
    assert calls[0] == calls[1]


def test_vispruner_at_full_importance_is_plain_attention(tokens_of: Tokens) -> None:
    source = tokens_of((1, 5, 9))
    (result,) = VisPruner(important=1.0)([source], [Budget(11)])
    assert torch.equal(result.tokens.features, source.features[most(source.saliency, 11, list(range(45)))])


@pytest.mark.parametrize(("method", "ranked"), [(VisionZip(), 8), (PruMerge(), 8), (VisPruner(important=1.0), 9)])
@pytest.mark.parametrize("scale", [1.0, 4e-6])
def test_of_tokens_attended_to_alike_the_earliest_stay(
    tokens_of: Tokens, method: VisionZip | PruMerge | VisPruner, ranked: int, scale: float
) -> None:
    """PP-12: three levels of attention, alone and in a batch; on a small scale the higher level is not lost among equals."""
    source = tokens_of((1, 5, 6), seed=2)
    saliency = torch.tensor([0.1, 0.5, 0.3])[torch.arange(30) % 3]
    tied = dataclasses.replace(source, saliency=scale * saliency)
    expected = most(saliency, ranked, list(range(30)))
    others = [tokens_of((1, 5, 6), seed=seed) for seed in (3, 4)]
    for found in (method([tied], [Budget(9)])[0], method([*others, tied], [Budget(9)] * 3)[2]):
        places = {tuple(place) for place in found.tokens.positions.tolist()}
        assert {tuple(source.positions[i].tolist()) for i in expected} <= places


@pytest.mark.parametrize("method", [VisionZip(), PruMerge(), VisPruner()])
def test_tokens_without_attention_are_refused(tokens_of: Tokens, method: VisionZip | PruMerge | VisPruner) -> None:
    """PP-01: never scores of nothing; the message says what to use instead."""
    blind = dataclasses.replace(tokens_of((1, 3, 3)), saliency=torch.empty(0))
    with pytest.raises(InputError, match=r"item 2 \(index 1, saliency\): .* needs the encoder's attention"):
        method([tokens_of((1, 2, 2)), blind], [Budget(4), Budget(3)])


@pytest.mark.parametrize("method", [VisionZip(), PruMerge()])
def test_tokens_without_keys_are_refused(tokens_of: Tokens, method: VisionZip | PruMerge) -> None:
    with pytest.raises(InputError, match=r"item 1 \(index 0, keys\): .* needs the encoder's keys"):
        method([dataclasses.replace(tokens_of((1, 3, 3)), keys=None)], [Budget(3)])


def test_unusable_knobs() -> None:
    for knobs in (lambda: VisionZip(contextual=0.0), lambda: PruMerge(uniform=1.5), lambda: VisPruner(step=0)):
        with pytest.raises(PluginError):
            knobs()
