"""Frames are chosen by their times: exactly as many as asked for, strictly rising, spread evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmsdk.errors import InputError
from mmsdk.vision.sampling import Sampling

RATES = st.sampled_from([0.5, 1.0, 2.5, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 240.0])


@given(st.integers(1, 4000), RATES, st.integers(1, 64))
def test_a_number_of_frames_is_met_with_the_middles_of_equal_parts(count: int, rate: float, frames: int) -> None:
    number = min(frames, count)
    # in whole numbers, where nothing is rounded
    assert Sampling(frames=frames).indices(count, rate) == [(2 * part + 1) * count // (2 * number) for part in range(number)]


@given(st.lists(st.floats(0.001, 30), min_size=1, max_size=300), st.integers(1, 64))
def test_a_number_of_frames_is_met_whatever_their_times(gaps: list[float], frames: int) -> None:
    starts = np.concatenate([[0.0], np.cumsum(gaps)])
    chosen = Sampling(frames=frames).chosen(starts)
    assert len(chosen) == min(frames, len(starts))
    assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < len(starts)


@given(st.integers(1, 1000), RATES, st.floats(0.1, 100))
def test_a_rate_takes_what_is_on_show_at_each_tick(count: int, rate: float, fps: float) -> None:
    chosen = Sampling(fps=fps).indices(count, rate)
    assert chosen == sorted(set(chosen)) and chosen[0] == 0 and chosen[-1] < count
    if fps < rate / 1.01:
        ticks = np.arange(len(chosen)) / fps
        assert (np.asarray(chosen) / rate <= ticks + 1e-3).all() and (ticks < (np.asarray(chosen) + 1) / rate + 1e-3).all()


def test_times_decide_and_not_the_count_where_the_rate_varies() -> None:
    # a hundred frames in the first second, ten in the nine that follow
    starts = [*(place / 100 for place in range(100)), *(1.0 + 0.9 * place for place in range(10))]
    chosen = np.asarray(starts)[Sampling(frames=5).chosen(starts, length=10.0)]
    assert np.abs(chosen - [1, 3, 5, 7, 9]).max() < 0.9


def test_a_rate_is_held_to_a_number_of_frames() -> None:
    assert Sampling(fps=1.0, frames=64).indices(100, 10.0) == list(range(0, 100, 10))
    assert Sampling(fps=1.0, frames=5).indices(100, 10.0) == [10, 30, 50, 70, 90]


def test_no_frame_and_one_frame() -> None:
    assert Sampling(frames=8).chosen([]) == []
    assert Sampling(fps=2.0).chosen([3.0]) == [0]


@pytest.mark.parametrize("settings", [{}, {"frames": 0}, {"fps": 0.0}, {"fps": -1.0}, {"fps": float("nan")}, {"fps": float("inf")}])
def test_what_cannot_be_sampled_is_said(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="sampling"):
        Sampling(**settings)  # type: ignore[arg-type]
