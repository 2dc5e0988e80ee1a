"""The synchroniser against message_filters' rule, written out slowly: every combination, the first that fits."""

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.errors import InputError
from mmsdk.vla.ros.stamps import SECOND
from mmsdk.vla.ros.sync import Synchronizer

MS = SECOND // 1000


class EveryCombination:
    """The published rule of ApproximateTimeSynchronizer: of each other stream those within slop of the new message, nearest first; the
    first combination whose spread is below slop is a set. Exponential in the number of streams."""

    def __init__(self, streams: list[str], slop: int, depth: int) -> None:
        self.streams, self.slop, self.depth = streams, slop, depth
        self.waiting: dict[str, list[tuple[int, object]]] = {stream: [] for stream in streams}

    def take(self, stream: str, stamp: int, value: object) -> dict[str, object] | None:
        mine = self.waiting[stream]
        if stamp in [held for held, _ in mine]:
            mine[[held for held, _ in mine].index(stamp)] = (stamp, value)
        else:
            mine.append((stamp, value))
        while len(mine) > self.depth:
            mine.remove(min(mine, key=lambda entry: entry[0]))
        others = [name for name in self.streams if name != stream]
        near = [sorted([s for s, _ in self.waiting[name] if abs(s - stamp) <= self.slop], key=lambda s: abs(s - stamp)) for name in others]
        for choice in product(*near):
            stamps = {stream: stamp, **dict(zip(others, choice, strict=True))}
            held = all(stamps[name] in [s for s, _ in self.waiting[name]] for name in self.streams)
            if held and max(stamps.values()) - min(stamps.values()) < self.slop:
                found = {name: dict(self.waiting[name])[stamps[name]] for name in self.streams}
                for name in self.streams:
                    self.waiting[name] = [entry for entry in self.waiting[name] if entry[0] != stamps[name]]
                return found
        return None


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=60),
    st.integers(1, 12),
)
@settings(max_examples=80, deadline=None)
def test_sets_are_those_of_every_combination(streams: int, depth: int, messages: list[tuple[int, int]], slop: int) -> None:
    names = [f"/{place}" for place in range(streams)]
    mine, slow = Synchronizer[int](names, slop / 1000, depth), EveryCombination(names, slop * MS, depth)
    for count, (stream, stamp) in enumerate(messages):
        name = names[stream % streams]
        assert mine.take(name, stamp * MS, count) == slow.take(name, stamp * MS, count)


def test_two_cameras_and_joints_with_jitter_drops_and_reordering() -> None:
    """30, 30 and 100 Hz, 4 ms of jitter, a tenth of the pictures lost, late by up to 20 ms: sets are tight and unique, none is missed."""
    random = Random(3)
    streams = {"/left": 33.3, "/right": 33.3, "/joints": 10.0}
    messages, periods = [], []
    for name, period in streams.items():
        for count in range(int(3000 / period)):
            if name == "/joints" or random.random() > 0.1:
                stamp = SECOND + round((count * period + random.uniform(-2, 2)) * MS)
                messages.append((stamp + round(random.uniform(0, 20) * MS), name, stamp))
                periods.append(count if name != "/joints" else -1)
    both = sum(periods.count(count) == 2 for count in set(periods))
    sync = Synchronizer[int](list(streams), 0.02)
    sets = [found for _, name, stamp in sorted(messages) if (found := sync.take(name, stamp, stamp))]
    assert all(max(found.values()) - min(found.values()) < 20 * MS for found in sets)
    for name in streams:
        assert len({found[name] for found in sets}) == len(sets)
    assert len(sets) == both > 50


def test_what_is_not_stamped_belongs_nowhere() -> None:
    sync = Synchronizer[str](["/a", "/b"], 0.05, 2)
    with pytest.raises(InputError, match="/a: a message that is not stamped"):
        sync.take("/a", 0, "x")
    with pytest.raises(InputError, match="there is no stream '/c'; there is /a, /b"):
        sync.take("/c", SECOND, "x")


def test_full_queues_lose_the_oldest_and_say_so() -> None:
    sync = Synchronizer[str](["/a", "/b"], 0.05, 2)
    for second in (1, 2, 3):
        assert sync.take("/a", second * SECOND, f"a{second}") is None
    assert sync.overflowed == 1 and sync.take("/b", SECOND, "b1") is None
    assert sync.take("/b", 3 * SECOND, "b3") == {"/a": "a3", "/b": "b3"}
    assert sync.take("/b", 3 * SECOND, "again") is None


def test_nothing_waits_after_the_clock_went_back() -> None:
    sync = Synchronizer[str](["/a", "/b"], 0.05)
    sync.take("/a", SECOND, "before")
    sync.clear()
    assert sync.take("/b", SECOND, "after") is None


@pytest.mark.parametrize(
    ("streams", "slop", "depth"),
    [([], 0.1, 1), (["/a", "/a"], 0.1, 1), (["/a"], 0.0, 1), (["/a"], float("nan"), 1), (["/a"], 1e300, 1), (["/a"], 0.1, 0)],
)
def test_nonsense_is_refused(streams: list[str], slop: float, depth: int) -> None:
    with pytest.raises(InputError, match="synchronizer: "):
        Synchronizer(streams, slop, depth)
