"""The layout of a LeRobotDataset v3.0: which files there are, and what a dataset says of itself.

meta/info.json                               features, counts, frames a second, where the other files are
meta/stats.json                              min, max, mean, std and count of every feature, over all episodes
meta/tasks.parquet                           what was to be done, by number
meta/episodes/chunk-000/file-000.parquet     one row an episode: length, tasks, where it lies, its own statistics
data/chunk-000/file-000.parquet              one row a frame; pictures too, where they are no videos
videos/<feature>/chunk-000/file-000.mp4      the frames of one camera, episode after episode

Published: huggingface/lerobot, codebase version v3.0. A file holds many episodes, a chunk many files. A feature of one number is a scalar.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmsdk.errors import InputError
from mmsdk.vision.values import cause
from mmsdk.vla.contract import Contract

__all__ = [
    "ACTION",
    "EPISODES",
    "INFO",
    "PICTURE",
    "STATE",
    "STATS",
    "TASKS",
    "VERSION",
    "Feature",
    "Info",
    "features_of",
    "placed",
    "read_info",
]

VERSION = "v3.0"
INFO, STATS, TASKS = Path("meta/info.json"), Path("meta/stats.json"), Path("meta/tasks.parquet")
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES, DATA, VIDEO = f"meta/episodes/{_FILE}.parquet", f"data/{_FILE}.parquet", f"videos/{{video_key}}/{_FILE}.mp4"
STATE, ACTION, PICTURE = "observation.state", "action", "observation.images."
_SPOT = re.compile(r"\{(chunk_index|file_index|video_key)(?::0(\d)d)?\}")
_WHOLE = ("frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True, slots=True)
class Feature:
    """One column: "float32", "int64", ..., "image" or "video", its shape, and the names of its numbers."""

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None

    @property
    def picture(self) -> bool:
        """Whether it is a camera's."""
        return self.dtype in ("image", "video")


@dataclass(frozen=True, slots=True)
class Info:
    """What meta/info.json says. `data` and `video` are the patterns of paths."""

    features: Mapping[str, Feature]
    fps: int
    robot: str = ""
    episodes: int = 0
    frames: int = 0
    tasks: int = 0
    data: str = DATA
    video: str = VIDEO

    def text(self) -> str:
        """As it stands in the file."""
        videos = any(feature.dtype == "video" for feature in self.features.values())
        features = {
            name: {"dtype": each.dtype, "shape": list(each.shape), "names": each.names and list(each.names)} | self._told(each)
            for name, each in self.features.items()
        }
        told = {
            "codebase_version": VERSION,
            "robot_type": self.robot or None,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": self.tasks,
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": self.data,
            "video_path": self.video if videos else None,
            "features": features,
        }
        return json.dumps(told, indent=4, ensure_ascii=False)

    def _told(self, feature: Feature) -> dict[str, Any]:
        if feature.dtype != "video":
            return {}
        height, width, channels = feature.shape
        size = {"video.height": height, "video.width": width, "video.channels": channels}
        kind = {"video.codec": "h264", "video.pix_fmt": "yuv420p", "video.is_depth_map": False, "video.fps": self.fps, "has_audio": False}
        return {"info": size | kind}


def features_of(contract: Contract, video: bool = True) -> dict[str, Feature]:
    """The features of a robot's dataset: upright RGB pictures, state and action in the contract's order and units, and lerobot's own five.

    Raises InputError for a camera whose name cannot be one here.
    """
    state = tuple(f"{feature.name}[{place}]" for feature in contract.state for place in range(feature.size))
    action = tuple(f"{command.feature.name}[{place}]" for command, place, _ in contract.each_command())
    found = {}
    for camera in contract.cameras:
        if not re.fullmatch(r"[\w.-]+", camera.name):
            raise InputError("has a name that is none of a folder; use letters, digits, _, . and -", item=f"camera {camera.name}")
        shape = (*camera.upright_size, 3)
        found[PICTURE + camera.name] = Feature("video" if video else "image", shape, ("height", "width", "channels"))
    found |= {STATE: Feature("float32", (len(state),), state)} if state else {}
    found |= {ACTION: Feature("float32", (len(action),), action), "timestamp": Feature("float32", (1,))}
    return found | {name: Feature("int64", (1,)) for name in _WHOLE}


def placed(root: Path, pattern: str, chunk: int, file: int, video: str = "") -> Path:
    """The path that a pattern stands for. Raises InputError where that lies outside of the dataset."""
    values = {"chunk_index": chunk, "file_index": file}

    def told(spot: re.Match[str]) -> str:
        return video if spot[1] == "video_key" else str(values[spot[1]]).zfill(int(spot[2] or 1))

    path = root / _SPOT.sub(told, pattern)
    if not path.resolve().is_relative_to(root.resolve()):
        raise InputError(f"the path {pattern!r} leads out of it", item=str(root))
    return path


def read_info(root: Path) -> Info:
    """What a dataset says of itself. Raises InputError for what is no dataset, of another version, or damaged."""
    item = str(root / INFO)
    try:
        told = json.loads((root / INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {cause(error)}", item=item) from None
    version = told.get("codebase_version") if isinstance(told, dict) else None
    if version != VERSION:
        raise InputError(f"is of version {version!r}, expected {VERSION!r}; lerobot converts older ones", item=item)
    try:
        features = {
            str(name): Feature(str(each["dtype"]), tuple(map(int, each["shape"])), _names(each.get("names")))
            for name, each in told["features"].items()
        }
        if int(told["fps"]) < 1:
            raise ValueError(f"{told['fps']} frames a second")
        return Info(
            features,
            fps=int(told["fps"]),
            robot=str(told["robot_type"] or ""),
            episodes=int(told["total_episodes"]),
            frames=int(told["total_frames"]),
            tasks=int(told["total_tasks"]),
            data=str(told["data_path"]),
            video=str(told["video_path"] or VIDEO),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"is damaged: {error!r}", item=item) from None


def _names(told: object) -> tuple[str, ...] | None:
    """Some datasets name groups of numbers ({"motors": [...]})."""
    if isinstance(told, Mapping):
        return tuple(str(name) for group in told.values() if isinstance(group, list) for name in group)
    return tuple(map(str, told)) if isinstance(told, list) else None
