"""The suite of streams: what memories of equal size still know of what was shown early, of many short streams, and of some that go on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from mmsdk.apps.console import Cell, counted
from mmsdk.apps.memory.happenings import Happening, happenings
from mmsdk.apps.memory.rows import GOING, Right, row, share, told
from mmsdk.apps.memory.streams import Held, Pace, answered, paced, watched
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.apps.train_mini.vocabulary import SHAPES
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.policy import Evictor, Storer
from mmsdk.kv.policy_memory import policy_of
from mmsdk.pipeline import Pipeline

__all__ = ["TOKENS", "Lasting", "check_lasting"]

TOKENS = 32
"""What is kept of the frames that go through the encoder together."""

_WINDOW, _BUDGET = 8, 0.25
_WATCHING, _SLIDING = ("evs", "simplecluster", "uniform"), ("window", "streaming")

# Of a stream that goes on: the policy, frames that go through the encoder together, shapes, and how often it is asked.
_POLICY, _LONG, _SHAPES, _TIMES = "h2o", 16, 8, 4

Rows = Iterator[dict[str, Cell]]


@dataclass(frozen=True, slots=True)
class Lasting:
    """Shows the same windows of frames to every memory; a pipeline that looks at each once (`Remembering`) spares most of the time.

    `streams` of `frames` frames show `events` shapes each, `forever` streams are of `endless` frames, of which `hold`
    tokens are held.
    """

    pipe: Pipeline
    decoder: Decoder
    artist: Artist
    streams: int
    events: int
    frames: int
    forever: int
    endless: int
    hold: int

    def rows(self, policies: Sequence[str]) -> Rows:
        """Of all that hold everything, those of these policies that bound a stream, and memories of the encoder's tokens ("watch")."""
        stories = happenings(self.artist, self.streams, self.events, _WINDOW)
        tokens = self.frames // _WINDOW * TOKENS + 1
        hold = max(TOKENS, int(_BUDGET * tokens))
        cells: list[tuple[str, float, Callable[[Happening], Held]]] = [("full", 1.0, self._held(f"window:{tokens + TOKENS}"))]
        cells += [(name, _BUDGET, self._held(_streamed(name, hold))) for name in policies if _bounds(name)]
        cells += [(f"watch {by}", _BUDGET, self._watched(by, hold)) for by in _WATCHING]
        for story in stories:
            # so that nobody pays for what is looked at once for all
            watched(self.pipe, "uniform", hold, story, self.frames, _WINDOW)
        right: dict[str, Right] = {}
        for name, budget, held_of in counted("streams", cells):
            held = [held_of(story) for story in stories]
            right[name] = [answer for one in held for answer in one.right]
            speed = sum(one.tokens for one in held) / sum(one.seconds for one in held)
            quality = share(right[name]), share(right["full"])
            counts = told(right[name], {} if name in ("full", *_SLIDING) else _windows(right))
            yield row("stream", name, budget, quality, held[0].held, held[0].read, speed, self.frames, counts)

    def going_on(self) -> Rows:
        """A policy and windows that are given at least as many bytes, asked a few times on the way.

        The full cache, whose answers stand beside theirs, is asked right after the last shape: it could not hold all of the stream.
        """
        shapes = max(1, min(_SHAPES, self.endless // _TIMES // _LONG))
        stories, shown = happenings(self.artist, self.forever, shapes, _LONG, kind=1), (shapes + 1) * _LONG
        whole = [answered(self.pipe, f"window:{(shapes + 2) * TOKENS}", story, shown, _LONG) for story in stories]
        full = share([answer for one in whole for answer in one.right])
        paces = {_POLICY: (self.hold, self._paced(_streamed(_POLICY, self.hold), stories))}
        hold = max(self.hold, ceil(paces[_POLICY][1][-1][0].held / self._each))
        paces |= {name: (hold, self._paced(_streamed(name, hold), stories)) for name in _SLIDING}
        for name, (held, times) in paces.items():
            for number, pace in enumerate(times):
                windows = {} if name in _SLIDING else {other: _right(paces[other][1][number]) for other in _SLIDING}
                yield _row(name, held, pace, full, told(_right(pace), windows))

    @property
    def _each(self) -> int:
        """Bytes of the keys and values of one token."""
        config, like = self.decoder.config, self.decoder.norm.weight
        return DenseCache.allocate(config.layers, 1, config.kv_heads, config.entry, 1, like.dtype, like.device).nbytes

    def _held(self, kv: str) -> Callable[[Happening], Held]:
        return lambda story: answered(self.pipe, kv, story, self.frames, _WINDOW)

    def _watched(self, by: str, hold: int) -> Callable[[Happening], Held]:
        return lambda story: watched(self.pipe, by, hold, story, self.frames, _WINDOW)

    def _paced(self, kv: str, stories: Sequence[Happening]) -> list[tuple[Pace, ...]]:
        """All streams at each of the times."""
        return list(zip(*(paced(self.pipe, kv, story, self.endless, _TIMES, _LONG) for story in stories), strict=True))


def check_lasting(events: int, frames: int, endless: int) -> None:
    """Raises InputError for streams that end before something has been shown and nothing has come after it."""
    if events > len(SHAPES):
        raise InputError(f"it is {events}; there are {len(SHAPES)} shapes", item="events")
    if frames < (least := (events + 1) * _WINDOW):
        raise InputError(f"it is {frames}; {events} shapes and what follows take at least {least}", item="frames")
    if endless < (least := _TIMES * _LONG):
        raise InputError(f"it is {endless}; a stream that is asked {_TIMES} times on its way has at least {least}", item="endless")


def _row(name: str, hold: int, at: Sequence[Pace], full: float, counts: Mapping[str, Cell]) -> dict[str, Cell]:
    """Of all streams at one time; the speed is since the time before."""
    first, speed = at[0], len(at) / sum(1 / one.tok_s for one in at)
    part = hold / (first.frames // _LONG * TOKENS + 1)
    return row("stream", f"{name}{GOING}", part, (share(_right(at)), full), first.held, first.read, speed, first.frames, counts)


def _right(at: Sequence[Pace]) -> Right:
    return [answer for one in at for answer in one.right]


def _windows(right: Mapping[str, Right]) -> dict[str, Right]:
    return {name: right[name] for name in _SLIDING if name in right}


def _bounds(name: str) -> bool:
    """Whether a policy can hold a stream."""
    policy = policy_of(f"{name}:64").policy
    return isinstance(policy, Evictor) or (isinstance(policy, Storer) and policy.bounds)


def _streamed(name: str, hold: int) -> str:
    """What `stream_session` is told, so that every policy holds as much between two windows."""
    return f"{name}:{hold},interval=1" if isinstance(policy_of(f"{name}:64").policy, Evictor) else f"{name}:{hold}"
