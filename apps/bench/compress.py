"""Compression on mini: every method at five budgets, on held-out pictures and clips: answers, time of each stage, bytes, fidelity.

mmsdk bench compress --json                            about half an hour on two cores
mmsdk bench compress:quick=true                        little is asked of everything, and it says little
mmsdk bench compress:methods=deft+uniform              some methods, and `identity`, the uncompressed model
mmsdk bench compress:plot=docs/images/compression.svg  draws accuracy against tokens and against time
mmsdk bench compress:saved=rows.jsonl                  writes each method there when it is done, and goes on from there
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mmsdk import plugins
from mmsdk.apps.compression.aims import aims
from mmsdk.apps.compression.asked import drawn
from mmsdk.apps.compression.costs import long_clips
from mmsdk.apps.compression.plot import drawn as plotted
from mmsdk.apps.compression.table import completed, end_rows, method_rows
from mmsdk.apps.console import Cell
from mmsdk.apps.memory.saved import Rows, resumed
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.compress import METHODS
from mmsdk.errors import InputError
from mmsdk.models.mini.family import load
from mmsdk.stages import Question
from mmsdk.weights import pull

__all__ = ["Compress"]

FLOORS = ("identity", "random", "uniform")
MEDIA = ("image", "clip")
# Beside a method at a budget: what finds its own, what was trained for others, what counts as many tokens as there were, and two that
# share the work.
MORE = {
    "tome": ("tome + simplecluster", "tome + deft"),
    "dora": ("dora-adaptive", "dora + simplecluster"),
    "braco": ("braco-trained", "braco-trained + proportional"),
    "simplecluster": ("simplecluster + proportional",),
    "deft": ("deft + proportional",),
}
# Each leaves a tenth of a clip's tokens. All but the first two leave the encoder less to do as well.
ENDS = (
    ("simplecluster:0.1",),
    ("deft:0.1",),
    ("tome:0.1",),
    ("dora:0.1",),
    ("tome:0.5", "simplecluster:0.2"),
    ("tome:0.5", "deft:0.2"),
    ("dora:0.4", "simplecluster:0.25"),
)
END = "end to end"
# What works inside the encoder beside the whole encoder, in turn, on pictures.
INSIDE = (("dora",), ("dora:0.5",), ("tome:0.5",))
TURN = "in turn"

_SEED = 1_000_011


@dataclass(frozen=True, slots=True)
class Compress:
    """`images` pictures and `clips` clips are asked up to `each` short questions with one right answer. `methods` are names joined by "+".

    Accuracy is that of greedy answers and does not depend on the batch. Times are medians of `repeats` batches with `tokens` said; methods
    that leave the encoder alone are given what it made, so that `encode_ms` is measured once for all of them. Last, batches of 4 clips of
    `frames` frames go from pixels to answers of 16 tokens, `pairs` times with a tenth of their tokens and with all, in turn, and batches of
    4 pictures with what works inside the encoder.
    """

    images: int = 48
    clips: int = 40
    each: int = 4
    repeats: int = 3
    tokens: int = 8
    frames: int = 16
    pairs: int = 5
    methods: str = "all"
    seed: int = _SEED
    plot: str = ""
    saved: str = ""
    quick: bool = False

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {method, stage, media, retention, batch, n, accuracy, accuracy_full, encode_ms, compress_ms, prefill_ms, decode_ms,
        kv_bytes, nqe, coverage, speedup, choose_ms, encoder_flops, worse, better}; milliseconds are those of one batch, bytes those of one
        question.

        `nqe` and `coverage` are None inside a model. `speedup` is the time of the uncompressed model over a row's, all stages summed; where
        inputs go end to end, the median of pairs. `choose_ms` is `compress_ms` and what of `prefill_ms` went into choosing,
        `encoder_flops` the operations of the encoder as a share of the whole one's. `worse` and `better` are how many of the questions the
        uncompressed model alone answers rightly, and how many the row alone. What a method is not made for is left out, and that is
        said. With `quick` all sizes are small whatever is said. Raises InputError for sizes, names and files that cannot be.
        """
        if self.quick:
            return dataclasses.replace(self, images=4, clips=4, each=1, repeats=1, tokens=2, frames=4, pairs=1, quick=False)()
        for name in ("images", "clips", "each", "repeats", "tokens", "frames", "pairs"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        for name in ("plot", "saved"):
            # known now, not in half an hour
            if not Path(getattr(self, name)).parent.is_dir():
                raise InputError(f"there is no folder {Path(getattr(self, name)).parent}; make it, or name another file", item=name)
        parts = [*(f"{media} {name}" for name in self._names() for media in MEDIA), END, TURN]
        rows = completed(self._measured(parts))
        if self.plot:
            Path(self.plot).write_text(plotted(rows), encoding="utf-8")
        return rows

    def aims(self, rows: Rows) -> Rows:
        """What was aimed at, and what these rows reach of it."""
        return aims(rows)

    def _names(self) -> list[str]:
        """The uncompressed model and the floors first, and behind all methods what is more than a method at a budget."""
        known = plugins.available(METHODS)
        asked = known if self.methods == "all" else self.methods.split("+")
        for name in asked:
            if name not in known:
                raise InputError(f"{name!r} is not known; join some of {', '.join(known)} by +, or write all", item="methods")
        ordered = dict.fromkeys((*FLOORS, *known))
        further = [name for method, names in MORE.items() if method in asked for name in names]
        return [*(name for name in ordered if name in (*asked, "identity")), *further]

    def _measured(self, parts: Sequence[str]) -> Rows:
        """The rows of all parts; all inputs are drawn and encoded once."""
        vlm = load("mini", None, torch.bfloat16, torch.device("cpu"))
        artist = Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True)
        counts = {"image": self.images, "clip": self.clips}
        about = {media: drawn(vlm, artist, media, counts[media], self.each, self.seed) for media in MEDIA}

        def measure(part: str) -> Iterator[dict[str, Cell]]:
            if not bar.n:
                # what a file held takes no time
                bar.initial = bar.n = parts.index(part)
            bar.set_postfix_str(part)
            if part == END:
                yield from end_rows(vlm, ENDS, long_clips(artist, 4, self.frames, self.seed), f"clip of {self.frames} frames", self.pairs)
            elif part == TURN:
                shown: list[Question] = [(one.media, one.questions[0].question) for one in about["image"][:4]]
                yield from end_rows(vlm, INSIDE, shown, f"image, {TURN}", 3 * self.pairs)
            else:
                media, _, name = part.partition(" ")
                yield from method_rows(vlm, name, media, about[media], self.tokens, self.repeats)
            bar.update()

        with tqdm(total=len(parts), desc="compress", unit="part", mininterval=2) as bar:
            if not self.saved:
                return [row for part in parts for row in measure(part)]
            return resumed(Path(self.saved), repr(dataclasses.replace(self, methods="all", plot="", saved="")), parts, measure)
