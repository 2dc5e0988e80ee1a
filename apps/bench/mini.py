"""mini on held-out data: the share of answers that are exactly right, beside the same model blind and looking at another picture."""

import hashlib
import importlib.util
import itertools
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mmsdk.apps.console import Cell
from mmsdk.apps.train_mini.captions import phrases, recall
from mmsdk.apps.train_mini.clips import Clip
from mmsdk.apps.train_mini.features import Renders, Shard, build, draw, media_of
from mmsdk.apps.train_mini.finetune import Adapters
from mmsdk.apps.train_mini.loop import evaluate, family
from mmsdk.apps.train_mini.needs import check_rendering
from mmsdk.apps.train_mini.renders import render
from mmsdk.apps.train_mini.scenes import Artist, Scene
from mmsdk.compress import Compression
from mmsdk.models.mini.family import Mini as Model
from mmsdk.models.mini.family import load
from mmsdk.pipeline import Pipeline
from mmsdk.weights import adapter_path, pull

__all__ = ["Mini"]

_SEED, _RENDER_SEED = 2_000_003, 30_000
"""Nobody looked at what these draw while the recipe was made: training and its own report use others."""


@dataclass(frozen=True, slots=True)
class Mini:
    """Draws scenes, photo crops and clips from a seed that training never uses, renders robot scenes, and asks about all of them.

    An answer counts where every token of it, the end included, is the model's first choice: what greedy decoding would say exactly.
    A caption is really generated, by the pipeline, and counts by the share of the things shown that it names.
    """

    scenes: int = 240
    photos: int = 24
    clips: int = 120
    renders: int = 60
    captions: int = 48
    seed: int = _SEED

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {type, n, accuracy, blind, shuffled}, one a family and question type, last all but captions.

        Raises InputError, naming the fix, where robots are asked for and cannot be rendered; without their extra they are left out.
        """
        robots = self._robots()
        vlm = load("mini", None, torch.bfloat16, torch.device("cpu"))
        with tempfile.TemporaryDirectory(prefix="mmsdk-bench-") as folder:
            items = list(itertools.chain(self._drawn(), self._rendered(Path(folder)) if robots else ()))
            shard = build(Path(folder) / "held.safetensors", iter(items), len(items), vlm.encoder, origin=f"seed {self.seed}")
        families = sorted({family(sample) for sample in shard.samples}, key=("scene", "photo", "clip", "robot", "robot clip").index)
        scores: list[_Score] = []
        for name in families:
            members = [i for i, sample in enumerate(shard.samples) if family(sample) == name]
            scores += _asked(name, vlm, shard, members)
            scores += _captions(name, vlm, [items[i] for i in members if phrases(items[i])][: self.captions])
        counted = [s for s in scores if not s.type.endswith("caption")]
        return [asdict(score) for score in (*scores, _overall(counted))]

    def versions(self) -> dict[str, str]:
        """The adapter that is asked, by the first 16 hex digits of its file's sha256."""
        return {"mini_adapter": hashlib.sha256(adapter_path().read_bytes()).hexdigest()[:16]}

    def _drawn(self) -> Iterator[Scene | Clip]:
        artist = Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True)
        return draw(artist, self.seed, self.scenes, self.photos, self.clips)

    def _robots(self) -> bool:
        if not self.renders:
            return False
        if importlib.util.find_spec("metaworld") is None:
            warnings.warn("no robot scenes in this result: they need the extra mmsdk[robots]", stacklevel=3)
            return False
        check_rendering()
        return True

    def _rendered(self, folder: Path) -> Iterator[Scene | Clip]:
        render(folder, images=self.renders, clips=max(1, self.renders // 4), seed=_RENDER_SEED)
        made = Renders(folder)
        yield from itertools.chain(made.scenes(), made.clips())


@dataclass(frozen=True, slots=True)
class _Score:
    type: str
    n: int
    accuracy: float
    blind: float
    shuffled: float


def _asked(name: str, vlm: Model, shard: Shard, members: Sequence[int]) -> list[_Score]:
    """Questions with one right answer, by type."""
    # the updates are merged into the weights already; these are new ones, which change nothing
    nothing = Adapters(vlm.decoder, 1, 0.0, 0)
    found, *controls = (
        evaluate(vlm.decoder, vlm.projector, nothing, shard, members, vlm.tokenizer, blind=blind, shuffled=shuffled)
        for blind, shuffled in ((False, False), (True, False), (False, True))
    )
    scores = []
    for kind, (n, accuracy) in found.items():
        if kind != "caption":
            blind, shuffled = (control.get(kind, (0, 0.0))[1] for control in controls)
            scores.append(_Score(f"{name}: {kind}", n, accuracy, blind, shuffled))
    return scores


def _captions(name: str, vlm: Model, items: Sequence[Scene | Clip]) -> list[_Score]:
    """One row of object recall, or none where the family has nothing to name."""
    if not items:
        return []
    pipe, media = Pipeline(vlm, Compression()), [media_of(item) for item in items]
    seeing, blind, shuffled = (recall(pipe, items, shown) for shown in (media, [None] * len(items), [*media[1:], media[0]]))
    return [_Score(f"{name}: caption", len(items), seeing, blind, shuffled)]


def _overall(scores: Sequence[_Score]) -> _Score:
    """The mean over all questions."""
    total = sum(s.n for s in scores)
    means = (sum(s.n * v for s, v in zip(scores, column, strict=True)) / total for column in zip(*map(_shares, scores), strict=True))
    return _Score("all but captions", total, *means)


def _shares(score: _Score) -> tuple[float, float, float]:
    return score.accuracy, score.blind, score.shuffled
