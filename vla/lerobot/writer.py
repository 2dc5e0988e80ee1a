"""A dataset in the making: frame by frame, episode by episode, whole once closed.

with DatasetWriter(Path("cups"), robot.contract) as dataset:
    for seen, action in demonstration:
        dataset.add(seen, action)
    dataset.end_episode()
"""

import io
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import PIL.Image
import pyarrow.parquet as pq
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vision.values import cause
from mmsdk.vla.contract import Contract
from mmsdk.vla.contract_file import contract_text
from mmsdk.vla.lerobot.layout import ACTION, EPISODES, INFO, PICTURE, STATE, STATS, TASKS, Feature, Info, features_of, placed
from mmsdk.vla.lerobot.statistics import Moments, Summary, joined, summary
from mmsdk.vla.lerobot.tables import data_table, episodes_table, tasks_table
from mmsdk.vla.lerobot.video import FrameWriter
from mmsdk.vla.types import Observation

__all__ = ["CONTRACT", "DatasetWriter"]

CONTRACT = Path("meta/contract.yaml")
"""The robot's contract, beside what lerobot writes."""

_LARGEST = 100 * 2**20


class DatasetWriter:
    """Writes one dataset. Files are closed at about 100 MiB, between two episodes."""

    def __init__(self, root: Path, contract: Contract, video: bool = True, largest: int = _LARGEST) -> None:
        """A new folder. `video`: pictures as mp4 (h264, which loses a little), else as PNG in the tables, exact.

        Raises InputError where there is something already, for videos of odd sides, and for a rate that is no whole number of frames.
        """
        fps = round(contract.rate)
        if abs(fps - contract.rate) > 1e-9 or fps < 1:
            raise InputError(f"{contract.rate} frames a second; a LeRobotDataset has a whole number of them", item=contract.name)
        features = features_of(contract, video)
        odd = [name for name, each in features.items() if each.dtype == "video" and (each.shape[0] % 2 or each.shape[1] % 2)]
        if odd:
            raise InputError("videos have even sides; write pictures as they are instead (video=False)", item=", ".join(odd))
        try:
            root.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"no dataset can be made there: {cause(error)}", item=str(root)) from None
        self.root, self._contract, self._features, self._fps, self._largest = root, contract, features, fps, largest
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._parts: dict[str, list[Summary]] = {}
        self._frames = self._file = 0
        self._table: pq.ParquetWriter | None = None
        self._videos: dict[str, tuple[int, FrameWriter]] = {}
        self._next: dict[str, int] = {}
        self._clear()

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(self, seen: Observation, action: Float[Tensor, " a"]) -> None:
        """A frame: what was seen, and what was then done. Its task is the instruction.

        Raises InputError for a camera that is missing, for what is of another size, and what is not finite; nothing is added.
        """
        columns = {ACTION: action, **({STATE: seen.state} if STATE in self._features else {})}
        rows = {name: self._checked(name, values) for name, values in columns.items()}
        pictures = {name: self._picture(name, each, seen) for name, each in self._features.items() if each.picture}
        for name, row in rows.items():
            self._rows[name].append(row)
        for name, pixels in pictures.items():
            self._moments[name].add(pixels)
            self._put(name, pixels)
        self._rows["task_index"].append(self._tasks.setdefault(seen.instruction, len(self._tasks)))

    def end_episode(self) -> None:
        """What was added since the last is an episode. Raises InputError where that is nothing."""
        length = len(self._rows["task_index"])
        if not length:
            raise InputError("an episode without frames", item=str(self.root))
        columns, number = self._columns(length), len(self._episodes)
        table = data_table(self._features, columns)
        row = self._placed(number, length) | {"tasks": [task for task, at in self._tasks.items() if at in set(self._rows["task_index"])]}
        if self._table is None:
            path = placed(self.root, Info(self._features, self._fps).data, 0, self._file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._table = pq.ParquetWriter(path, table.schema, compression="snappy")
        self._table.write_table(table)
        told = {name: summary(np.asarray(columns[name])) for name, each in self._features.items() if not each.picture}
        told |= {name: moments.summary() for name, moments in self._moments.items()}
        for name, part in told.items():
            self._parts.setdefault(name, []).append(part)
        self._episodes.append(row | {f"stats/{name}/{key}": value.tolist() for name, part in told.items() for key, value in part.items()})
        self._frames += length
        self._clear()
        self._rotate()

    def close(self) -> None:
        """Finish the dataset: frames of an episode that was not ended are not in it, though a video may hold them."""
        for _, writer in self._videos.values():
            writer.close()
        if self._table is not None:
            self._table.close()
        info = Info(self._features, self._fps, self._contract.name, len(self._episodes), self._frames, len(self._tasks))
        (self.root / "meta").mkdir(exist_ok=True)
        (self.root / INFO).write_text(info.text(), encoding="utf-8")
        (self.root / CONTRACT).write_text(contract_text(self._contract), encoding="utf-8")
        pq.write_table(tasks_table(list(self._tasks)), self.root / TASKS)
        if self._episodes:
            path = placed(self.root, EPISODES, 0, 0)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(episodes_table(self._episodes), path)
        stats = {name: {key: value.tolist() for key, value in joined(parts).items()} for name, parts in self._parts.items()}
        (self.root / STATS).write_text(dumps(stats, indent=4), encoding="utf-8")

    def _clear(self) -> None:
        self._rows: dict[str, list[Any]] = {name: [] for name, each in self._features.items() if each.dtype != "video"}
        self._moments = {name: Moments() for name, each in self._features.items() if each.picture}
        self._starts = {name: writer.seconds for name, (_, writer) in self._videos.items()}

    def _checked(self, name: str, values: Tensor) -> "np.ndarray[Any, np.dtype[np.float32]]":
        row = values.detach().cpu().float().numpy()
        (size,) = self._features[name].shape
        if row.shape != (size,) or not np.isfinite(row).all():
            raise InputError(f"{row.shape} numbers, expected {size}, all of them finite", item=name)
        return row

    def _picture(self, name: str, feature: Feature, seen: Observation) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        image: Image | None = seen.images.get(name.removeprefix(PICTURE))
        if image is None or (*image.size, 3) != feature.shape:
            found = "no picture" if image is None else f"a picture of {image.size}"
            raise InputError(f"{found}, expected one of {feature.shape[:2]}", item=name)
        return np.ascontiguousarray(image.pixels.permute(1, 2, 0).cpu().numpy())

    def _put(self, name: str, pixels: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        feature = self._features[name]
        if feature.dtype == "image":
            data = io.BytesIO()
            PIL.Image.fromarray(pixels).save(data, "PNG")
            self._rows[name].append({"bytes": data.getvalue(), "path": f"frame-{len(self._rows[name]):06d}.png"})
            return
        if name not in self._videos:
            self._open(name, self._next.get(name, 0))
        self._videos[name][1].add(pixels)

    def _open(self, name: str, file: int) -> None:
        height, width, _ = self._features[name].shape
        path = placed(self.root, Info(self._features, self._fps).video, 0, file, name)
        self._videos[name] = file, FrameWriter(path, self._fps, height, width)
        self._starts[name] = 0.0

    def _columns(self, length: int) -> dict[str, Any]:
        steps = np.arange(length)
        told = {
            "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, len(self._episodes)),
            "index": steps + self._frames,
        }
        return {**self._rows, **told}

    def _placed(self, number: int, length: int) -> dict[str, Any]:
        where: dict[str, Any] = {"episode_index": number, "length": length}
        where |= {"data/chunk_index": 0, "data/file_index": self._file}
        where |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + length}
        for name, (file, writer) in self._videos.items():
            begin = self._starts[name]
            where |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": file}
            where |= {f"videos/{name}/from_timestamp": begin, f"videos/{name}/to_timestamp": writer.seconds}
        return where | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}

    def _rotate(self) -> None:
        """Begin new files where the old ones are large."""
        path = placed(self.root, Info(self._features, self._fps).data, 0, self._file)
        if self._table is not None and path.stat().st_size > self._largest:
            self._table.close()
            self._table, self._file = None, self._file + 1
        for name, (file, writer) in list(self._videos.items()):
            if writer.size > self._largest:
                writer.close()
                del self._videos[name]
                self._next[name] = file + 1
