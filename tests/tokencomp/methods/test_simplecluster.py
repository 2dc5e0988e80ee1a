"""SimpleCluster against the rules of its paper, computed token by token in double precision."""

import cmath
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmsdk.errors import PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.simplecluster import SimpleCluster, _turned
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]


def turned(vector: np.ndarray, position: list[int]) -> np.ndarray:
    """One token under RoPE: time has a third of the channels and what is left over, then rows, then columns; pairs are neighbours."""
    third = len(vector) // 3
    sizes, out, start = [len(vector) - 2 * third, third, third], vector.copy(), 0
    for size, coordinate in zip(sizes, position, strict=True):
        pairs = size // 2
        for i in range(pairs):
            at = start + 2 * i
            value = complex(vector[at], vector[at + 1]) * cmath.exp(1j * coordinate * 10000.0 ** (-i / pairs))
            out[at], out[at + 1] = value.real, value.imag
        start += size
    return out


def normalised(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def grouped(tokens: VisualTokens, m: int, *, place: bool = True) -> list[int]:
    """The group of each token by the published steps, or without its place."""
    seen = [np.array(x) for x in tokens.features.double().tolist()]
    z = [normalised(turned(x, p) if place else x) for x, p in zip(seen, tokens.positions.tolist(), strict=True)]
    seeds = [0]
    while len(seeds) < m:
        seeds.append(min(range(len(z)), key=lambda i: max(z[i] @ z[c] for c in seeds)))
    prototypes = [z[i] for i in seeds]
    for _ in range(10):
        labels = [max(range(m), key=lambda g: x @ prototypes[g]) for x in z]
        covered = [x @ prototypes[g] for x, g in zip(z, labels, strict=True)]
        worst = sorted(range(len(z)), key=lambda i: covered[i])
        updated = []
        for g in range(m):
            members = [x for x, label in zip(z, labels, strict=True) if label == g]
            updated.append(normalised(sum(members) / len(members)) if members else z[worst.pop(0)])
        change = max(np.abs(a - b).max() for a, b in zip(updated, prototypes, strict=True))
        prototypes = updated
        if change <= 1e-6:
            break
    return [max(range(m), key=lambda g: x @ prototypes[g]) for x in z]


CASES = [((4, 3, 5), 9), ((1, 7, 6), 5), ((6, 4, 4), 2), ((2, 5, 5), 24), ((1, 9, 2), 17)]


@pytest.mark.parametrize(("grid", "m"), CASES)
@pytest.mark.parametrize("width", [12, 20])
def test_assignments_are_those_of_the_slow_reference(tokens_of: Tokens, grid: tuple[int, int, int], m: int, width: int) -> None:
    source = tokens_of(grid, seed=m, width=width)
    (result,) = SimpleCluster()([source], [Budget(m)])
    labels = grouped(source, m)
    earliest = sorted({label: labels.index(label) for label in labels}.values())
    assert result.audit.assignment.tolist() == [earliest.index(labels.index(label)) for label in labels]
    assert torch.equal(result.tokens.positions, source.positions[earliest])
    for group, first in enumerate(earliest):
        members = [i for i, label in enumerate(labels) if label == labels[first]]
        weight = source.weight[members].double()
        mean = (source.features[members].double() * weight[:, None]).sum(0) / weight.sum()
        torch.testing.assert_close(result.tokens.features[group].double(), mean, rtol=1e-5, atol=1e-5)
    assert float(result.tokens.weight.sum()) == float(source.weight.sum())


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 3, 2)])
def test_few_and_odd_channels_are_turned_one_pair_at_a_time(tokens_of: Tokens, grid: tuple[int, int, int], width: int) -> None:
    tokens = tokens_of(grid, width=width)
    found = _turned(tokens.features.float()[None], tokens.positions[None], grid, 10000.0)[0]
    for ours, vector, position in zip(found, tokens.features.double(), tokens.positions.tolist(), strict=True):
        np.testing.assert_allclose(ours, turned(vector.numpy(), position), atol=1e-5)


def test_without_place_tokens_are_grouped_by_what_is_seen(tokens_of: Tokens) -> None:
    """By the same steps, and the same wherever the tokens are; on this clip place makes a difference."""
    source = tokens_of((4, 3, 5), seed=9, width=20)
    moved = dataclasses.replace(source, positions=source.positions.flip(0))
    here, there = (SimpleCluster(place=False)([item], [Budget(9)])[0].audit.assignment for item in (source, moved))
    alike = [[a == b for b in labels] for labels in (here.tolist(), there.tolist(), grouped(source, 9, place=False)) for a in labels]
    assert alike[:60] == alike[60:120] == alike[120:]
    assert not torch.equal(here, SimpleCluster()([source], [Budget(9)])[0].audit.assignment)


def test_a_batch_of_alike_shapes_gives_what_each_gives_alone(tokens_of: Tokens) -> None:
    """They settle after different numbers of rounds."""
    batch = [tokens_of((3, 4, 5), seed=seed) for seed in range(8)]
    together = SimpleCluster()(batch, [Budget(7)] * 8)
    for item, result in zip(batch, together, strict=True):
        (alone,) = SimpleCluster()([item], [Budget(7)])
        assert torch.equal(alone.audit.assignment, result.audit.assignment) and torch.equal(alone.tokens.features, result.tokens.features)


def test_copies_of_a_few_distinct_vectors_collapse_to_them(tokens_of: Tokens) -> None:
    """Content in the channels that hardly turn, so that place plays no part."""
    distinct = torch.zeros(4, 48)
    distinct[[0, 1, 2, 3], [14, 30, 46, 15]] = torch.tensor([1.0, 2.0, 3.0, -4.0])
    which = torch.arange(36) * 7 % 4
    source = tokens_of((4, 3, 3), features=distinct[which])
    (result,) = SimpleCluster()([source], [Budget(4)])
    torch.testing.assert_close(result.tokens.features, distinct[which[:4]], rtol=1e-6, atol=0.0)
    assert torch.equal(result.audit.assignment, torch.arange(36) % 4)


def test_place_matters(tokens_of: Tokens) -> None:
    """A picture of one colour falls into groups of neighbours, not of strangers."""
    source = tokens_of((1, 4, 4), features=torch.ones(16, 24))
    (result,) = SimpleCluster()([source], [Budget(4)])
    place = source.positions[:, 1:].double()
    groups = [place[result.audit.assignment == g] for g in range(4)]
    within = sum(float((group - group.mean(dim=0)).square().sum()) for group in groups)
    assert within < float((place - place.mean(dim=0)).square().sum()) / 2


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("m", [2, 19, 29])
def test_fewer_distinct_tokens_than_groups(tokens_of: Tokens, value: float, m: int) -> None:
    """PP-10, PP-12: at one place and all alike, every group still has a member, and features stay what they are."""
    source = tokens_of((1, 5, 6), features=torch.full((30, 12), value))
    source = dataclasses.replace(source, positions=torch.zeros(30, 3, dtype=torch.int64))
    (result,) = SimpleCluster()([source], [Budget(m)])
    assert torch.equal(result.audit.assignment.unique(), torch.arange(m))
    torch.testing.assert_close(result.tokens.features, torch.full((m, 12), value))


def test_unusable_knobs() -> None:
    with pytest.raises(PluginError, match="at least one round"):
        SimpleCluster(rounds=0)
