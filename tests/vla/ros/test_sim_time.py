"""The clock of a simulation: it follows /clock, stands still with it, and a jump back is told to everybody who must know."""

import threading
import time
from collections.abc import Callable

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.clock import Clock as LoopClock
from mmsdk.vla.ros.messages import Clock, Message, Time
from mmsdk.vla.ros.sim_time import SimTime, SystemTime


def at(second: int, nanosecond: int = 0) -> Clock:
    return Clock(Time(second, nanosecond))


class Sleeper:
    """Sleeps in a thread of its own; `woke` is set when it wakes."""

    def __init__(self, clock: SimTime, seconds: float) -> None:
        self.woke = threading.Event()
        self._thread = threading.Thread(target=self._sleep, args=(clock, seconds), daemon=True)
        self._thread.start()

    def _sleep(self, clock: SimTime, seconds: float) -> None:
        clock.sleep(seconds)
        self.woke.set()


def test_time_is_what_clock_says(heard: Callable[[Message], object]) -> None:
    clock = SimTime()
    assert isinstance(clock, LoopClock) and not clock.started and clock.now() == 0
    clock.take(heard(at(7, 250_000_000)))
    assert clock.started and clock.now() == 7.25 and clock.jumps == 0
    for wrong in (at(-1), at(1, 1_000_000_000)):
        with pytest.raises(InputError):
            clock.take(wrong)
    assert clock.now() == 7.25


def test_a_sleeper_waits_for_the_simulation_and_not_for_the_machine() -> None:
    clock = SimTime()
    clock.take(at(10))
    sleeper = Sleeper(clock, 0.5)
    assert not sleeper.woke.wait(0.05)
    clock.take(at(10, 499_999_999))
    assert not sleeper.woke.wait(0.05)
    clock.take(at(10, 500_000_000))
    assert sleeper.woke.wait(5)
    begun = time.monotonic()
    clock.sleep(0.0)
    clock.sleep(-1.0)
    assert time.monotonic() - begun < 1


def test_a_jump_back_wakes_sleepers_and_empties_buffers() -> None:
    emptied: list[float] = []
    clock = SimTime([lambda: emptied.append(clock.now()), lambda: emptied.append(-1.0)])
    clock.take(at(100))
    clock.take(at(100))
    sleeper = Sleeper(clock, 5.0)
    assert not sleeper.woke.wait(0.05) and not emptied
    clock.take(at(3))
    assert sleeper.woke.wait(5) and emptied == [3.0, -1.0] and clock.jumps == 1 and clock.now() == 3


def test_a_closed_clock_goes_on_by_the_machines() -> None:
    clock = SimTime()
    clock.take(at(100))
    sleeper = Sleeper(clock, 1000.0)
    assert not sleeper.woke.wait(0.02)
    clock.close()
    assert sleeper.woke.wait(5)
    before, begun = clock.now(), time.monotonic()
    clock.sleep(0.03)
    assert time.monotonic() - begun >= 0.03 and clock.now() - before >= 0.03 and clock.now() >= 100


def test_system_time_is_the_date_that_drivers_stamp_with() -> None:
    clock = SystemTime()
    assert isinstance(clock, LoopClock) and abs(clock.now() - time.time()) < 1
    begun = time.monotonic()
    clock.sleep(0.01)
    clock.sleep(-5.0)
    assert 0.01 <= time.monotonic() - begun < 2
