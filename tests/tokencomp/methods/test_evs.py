"""EVS: what changed since the frame before."""

from collections.abc import Callable

import pytest
import torch

from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.evs import EVS
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]


def dissimilarities(source: VisualTokens) -> list[float]:
    """By the place of each token; 3 for the first frame, 2 where nothing went before."""
    places = [tuple(p) for p in source.positions.tolist()]
    first = min(t for t, _, _ in places)
    out = []
    for x, (t, y, c) in zip(source.features.double(), places, strict=True):
        if t == first:
            out.append(3.0)
        elif (t - 1, y, c) in places:
            other = source.features[places.index((t - 1, y, c))].double()
            out.append(1 - float(x @ other / (x.norm() * other.norm())))
        else:
            out.append(2.0)
    return out


@pytest.mark.parametrize("m", [12, 13, 30, 59])
def test_the_most_changed_stay_after_the_first_frame(tokens_of: Tokens, m: int) -> None:
    source = tokens_of((5, 3, 4), seed=m)
    scores = dissimilarities(source)
    (result,) = EVS()([source], [Budget(m)])
    expected = sorted(sorted(range(60), key=lambda i: -scores[i])[:m])
    assert torch.equal(result.tokens.features, source.features[expected])
    assert result.tokens.positions[:12, 0].max() == 0
    torch.testing.assert_close(result.audit.scores, torch.tensor(scores), rtol=1e-4, atol=1e-5)


def test_a_still_clip_keeps_the_earliest_frames(tokens_of: Tokens) -> None:
    """Nothing changes anywhere, so the sort is stable: the first frame, then the second in reading order."""
    still = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    (result,) = EVS()([tokens_of((4, 3, 4), features=still)], [Budget(15)])
    assert result.audit.assignment.tolist() == [*range(15), *[-1] * 33]


def test_only_what_moves_is_kept(tokens_of: Tokens) -> None:
    features = torch.ones(48, 8)
    features[[12 + 5, 24 + 6, 36 + 7], :4] = -1.0
    (result,) = EVS()([tokens_of((4, 3, 4), features=features)], [Budget(12 + 5)])
    # what has gone is as new as what has come
    assert {17, 29, 30, 42, 43} == {i for i in range(12, 48) if int(result.audit.assignment[i]) >= 0}


def test_below_one_frame_it_is_thinned_evenly(tokens_of: Tokens) -> None:
    (picture,) = EVS()([tokens_of((1, 4, 10))], [Budget(8)])
    assert [i for i in range(40) if int(picture.audit.assignment[i]) >= 0] == [2, 7, 12, 17, 22, 27, 32, 37]


def test_places_left_empty_by_another_method_count_as_new(tokens_of: Tokens) -> None:
    holes = torch.tensor([0, 1, 2, 5, 7, 8, 10, 11, 12, 15, 18, 20, 21, 22, 23])
    source = tokens_of((4, 2, 3), seed=3, kept=holes)
    scores = dissimilarities(source)
    (result,) = EVS()([source], [Budget(9)])
    expected = sorted(sorted(range(15), key=lambda i: -scores[i])[:9])
    assert torch.equal(result.tokens.features, source.features[expected])
    torch.testing.assert_close(result.audit.scores, torch.tensor(scores), rtol=1e-4, atol=1e-5)
