"""The demo's drawn scene and clip: `python -m mmsdk.apps.train_mini.samples FOLDER` writes scene.png and motion.mp4.

Both come from seeds that training never uses, with what it holds out, and show shapes on a plain ground alone, so that they can ship.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from mmsdk.apps.train_mini.clips import Clip, clip
from mmsdk.apps.train_mini.scenes import Artist, Scene, Thing
from mmsdk.weights import pull

__all__ = ["main"]

_SEED = 1_000_007
_SIDE, _RATE = 224, 4.0


def _scene(artist: Artist) -> Scene:
    """The first scene of four different shapes on a plain ground."""
    drawn = (artist.scene(np.random.default_rng((_SEED, i))) for i in itertools.count())
    return next(s for s in drawn if s.background and len({t.phrase for t in s.things}) == 4 == len(s.things) and _shapes(s.things))


def _clip(artist: Artist) -> Clip:
    """The first clip of two shapes, at least one of which moves, on a plain ground."""
    drawn = (clip(artist, np.random.default_rng((_SEED, i)), _SIDE) for i in itertools.count())
    return next(
        c for c in drawn if c.story == "motion" and len(c.actors) == 2 and _shapes([a.thing for a in c.actors]) and _plain(c.frames[0])
    )


def _shapes(things: Sequence[Thing]) -> bool:
    return all(t.kind == "shape" for t in things)


def _plain(frame: np.ndarray) -> bool:
    return len(np.unique(frame[:8].reshape(-1, 3), axis=0)) == 1


def main(folder: Path) -> None:
    """Write both files into `folder`."""
    artist = Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True)
    Image.fromarray(_scene(artist).pixels).save(folder / "scene.png", optimize=True)
    moving = _clip(artist)
    writer = cv2.VideoWriter(str(folder / "motion.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), _RATE, (_SIDE, _SIDE))
    for frame in moving.frames:
        writer.write(frame[..., ::-1])
    writer.release()
    print(*(f"{a.thing.phrase}: {a.motion}" for a in moving.actors), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
