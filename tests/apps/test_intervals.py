"""Intervals of ratios against what they promise: trials drawn again and again, of which they hold the truth as often as they say."""

import numpy as np
import pytest

from mmsdk.apps.intervals import matched_ratio, ratio


@pytest.mark.parametrize(("first", "second", "alike"), [(0.9, 0.8, 0.78), (0.85, 0.5, 0.48), (0.9, 0.9, 0.88), (0.6, 0.9, 0.58)])
def test_intervals_of_a_ratio_hold_the_truth(first: float, second: float, alike: float) -> None:
    """150 questions a thousand times, of which both answer a share `alike`."""
    draw = np.random.default_rng(0).multinomial(150, [alike, first - alike, second - alike, 1 - first - second + alike], size=1000)
    truth, found, wide = second / first, list[bool](), list[bool]()
    for both, worse, better, _ in draw.tolist():
        low, high = matched_ratio(both, worse, better)
        found.append(low <= truth <= high)
        outer = ratio(both + better, both + worse, 150)
        # of questions that mostly the same ones answer, not knowing which makes less sure
        wide.append(outer[0] < low and high < outer[1])
    assert 0.93 <= np.mean(found) <= 0.995 and np.mean(wide) > 0.9


def test_none_that_differ_are_no_certainty() -> None:
    for low, high in (matched_ratio(100, 0, 0), ratio(100, 100, 100), matched_ratio(0, 0, 0), ratio(0, 0, 3)):
        assert low < 1 < high
    assert matched_ratio(100, 0, 0)[0] > matched_ratio(10, 0, 0)[0] > 0
