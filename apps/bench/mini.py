"""mini on held-out data: the share of answers that are exactly right, beside the same model blind and looking at another picture."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mmsdk.apps.console import Cell
from mmsdk.apps.train_mini.features import build, draw
from mmsdk.apps.train_mini.finetune import Adapters
from mmsdk.apps.train_mini.loop import evaluate, family
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.models.mini.family import load
from mmsdk.weights import pull

__all__ = ["Mini"]


@dataclass(frozen=True, slots=True)
class Mini:
    """Draws scenes, photo crops and clips from a seed that training never uses, with what it holds out, and asks about all of them.

    An answer counts where every token of it, the end included, is the model's first choice: what greedy decoding would say exactly.
    """

    scenes: int = 240
    photos: int = 24
    clips: int = 80
    seed: int = 1_000_003

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {type, n, accuracy, blind, shuffled}, one a family and question type, last all but captions and descriptions."""
        vlm = load("mini", None, torch.bfloat16, torch.device("cpu"))
        artist = Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True)
        items = draw(artist, self.seed, self.scenes, self.photos, self.clips)
        with tempfile.TemporaryDirectory(prefix="mmsdk-bench-") as folder:
            shard = build(Path(folder) / "held.safetensors", items, self.scenes + self.photos + self.clips, vlm.encoder)
        # the updates are merged into the weights already; these are new ones, which change nothing
        nothing = Adapters(vlm.decoder, 1, 0.0, 0)
        scores: list[_Score] = []
        for name in ("scene", "photo", "clip"):
            members = [i for i, sample in enumerate(shard.samples) if family(sample) == name]
            found, *controls = (
                evaluate(vlm.decoder, vlm.projector, nothing, shard, members, vlm.tokenizer, blind=blind, shuffled=shuffled)
                for blind, shuffled in ((False, False), (True, False), (False, True))
            )
            for kind, (n, accuracy) in found.items():
                blind, shuffled = (control.get(kind, (0, 0.0))[1] for control in controls)
                scores.append(_Score(f"{name}: {kind}", n, accuracy, blind, shuffled))
        return [asdict(score) for score in (*scores, _overall([s for s in scores if not s.type.endswith(("caption", "photo"))]))]


@dataclass(frozen=True, slots=True)
class _Score:
    type: str
    n: int
    accuracy: float
    blind: float
    shuffled: float


def _overall(scores: Sequence[_Score]) -> _Score:
    """The mean over all questions."""
    total = sum(s.n for s in scores)
    means = (sum(s.n * v for s, v in zip(scores, column, strict=True)) / total for column in zip(*map(_shares, scores), strict=True))
    return _Score("all but captions", total, *means)


def _shares(score: _Score) -> tuple[float, float, float]:
    return score.accuracy, score.blind, score.shuffled
