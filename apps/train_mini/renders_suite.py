"""What the two simulator suites share: episodes, the views they are shot from, and the parts that they are written to.

A suite runs as a program, one process for each, because only one renderer may live in a process.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mmsdk.apps.train_mini.renders_stage import Camera, Pose, Seen, Stage

__all__ = ["Episode", "Plan", "main", "shoot"]

FRAMES = 8
VIEWS = 12  # tries for one that shows what the task is about
MAX_ARM = 0.4  # share of the picture that the arm may fill


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make of one task: for each episode how many pictures and whether a clip."""

    seed: int
    size: int
    pictures: tuple[int, ...]
    clips: tuple[bool, ...]

    @classmethod
    def of(cls, number: int, tasks: int, images: int, clips: int, seed: int, size: int) -> "Plan":
        """Task `number`'s part of a suite: as many episodes as clips, at least one for every 8 pictures."""
        count = max(clips, -(-images // 8))
        mine = range(number, count, tasks)
        return cls(seed, size, tuple(len(range(e, images, count)) for e in mine), tuple(e < clips for e in mine))


@dataclass(slots=True)
class Episode:
    """Pictures and at most one clip of one episode, with their labels."""

    suite: str
    task: str
    action: str
    pictures: list[np.ndarray] = field(default_factory=list)
    labels: list[dict[str, object]] = field(default_factory=list)
    clips: list[np.ndarray] = field(default_factory=list)
    clip_labels: list[dict[str, object]] = field(default_factory=list)

    def add_picture(self, pixels: np.ndarray, objects: Sequence[Seen]) -> None:
        """Add one picture (h w 3); a blank one means that rendering broke."""
        if pixels.std() < 4:
            raise RuntimeError(f"{self.suite} {self.task}: the renderer gave a blank picture; is another renderer alive in this process?")
        self.pictures.append(pixels)
        self.labels.append({"suite": self.suite, "task": self.task, "objects": list(objects)})

    def set_clip(self, frames: np.ndarray, objects: Sequence[Seen]) -> None:
        """Set the clip (8 h w 3); it must move."""
        if frames.std() < 4 or np.array_equal(frames[0], frames[-1]):
            raise RuntimeError(f"{self.suite} {self.task}: the clip is blank or does not move")
        self.clips.append(frames)
        self.clip_labels.append({"suite": self.suite, "task": self.task, "action": self.action, "objects": list(objects)})


def _view(stage: Stage, poses: Sequence[Pose], aim: Callable[[], Camera], wanted: set[str]) -> Camera | None:
    """A camera that sees one of the wanted things in every one of `poses`, the arm not filling the picture; None if no try finds one."""
    for _ in range(VIEWS):
        stage.show(poses[0])
        camera = aim()
        for pose in poses:
            stage.show(pose)
            areas = {str(one["name"]): float(one["area"]) for one in stage.seen(camera)}
            if not wanted & set(areas) or areas.get("robot arm", 0.0) > MAX_ARM:
                break
        else:
            return camera
    return None


def shoot(
    episode: Episode, stage: Stage, plan: Plan, index: int, poses: Sequence[Pose], aim: Callable[[], Camera], wanted: set[str]
) -> Episode | None:
    """Pictures at random moments, each from a view of its own, and the clip from one view; None where no view shows the thing."""
    evenly = [poses[i] for i in np.linspace(0, len(poses) - 1, FRAMES).round().astype(int)]
    view = _view(stage, [evenly[0], evenly[-2]], aim, wanted)
    if view is None:
        return None
    for _ in range(plan.pictures[index]):
        pose = poses[int(stage.rng.integers(len(poses)))]
        camera = _view(stage, [pose], aim, wanted) or view
        stage.show(pose)
        episode.add_picture(stage.picture(camera), stage.seen(camera))
    if plan.clips[index]:
        stage.show(evenly[0])
        objects = stage.seen(view)
        frames = []
        for pose in evenly:
            stage.show(pose)
            frames.append(stage.picture(view))
        episode.set_clip(np.stack(frames), objects)
    return episode


def main(tasks: Sequence[str], episodes: Callable[[str, Plan], Iterator[Episode]]) -> None:
    """A suite's program: PARTS IMAGES CLIPS SEED SIZE PROGRESS; one file per task in the folder PARTS, those that exist are kept."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    images, clips, seed, size, progress = map(int, sys.argv[2:7])
    for number, task in enumerate(tqdm(tasks, disable=not progress)):
        plan = Plan.of(number, len(tasks), images, clips, seed, size)
        part = folder / f"{task}.npz"
        if plan.pictures and not part.exists():
            _save(part, list(episodes(task, plan)))


def _save(path: Path, made: Sequence[Episode]) -> None:
    """Write a task's episodes at once or not at all."""
    labels = json.dumps({"images": [v for e in made for v in e.labels], "clips": [v for e in made for v in e.clip_labels]})
    pictures = [v for e in made for v in e.pictures]
    clips = [v for e in made for v in e.clips]
    rough = path.with_suffix(".tmp")
    with rough.open("wb") as file:
        np.savez(file, images=np.array(pictures, np.uint8), clips=np.array(clips, np.uint8), labels=np.array(labels))
    rough.replace(path)
