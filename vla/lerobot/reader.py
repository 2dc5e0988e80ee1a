"""A LeRobotDataset v3.0 as it lies on the disk, episode by episode; also such as lerobot itself has written.

dataset = Dataset(Path("cups"))
for episode in range(len(dataset)):
    states = dataset.numbers(episode, "observation.state")
    for picture in dataset.pictures(episode, "observation.images.front"):
        ...
"""

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake import load_image
from mmsdk.vision.types import Image
from mmsdk.vla.lerobot.layout import EPISODES, TASKS, Feature, placed, read_info
from mmsdk.vla.lerobot.video import frames_between

__all__ = ["Dataset"]


class Dataset:
    """Tables are read an episode at a time; nothing is kept."""

    def __init__(self, root: Path) -> None:
        """Raises InputError for what is no dataset of this version, or damaged."""
        self.root, self.info = root, read_info(root)
        files = sorted((root / EPISODES.partition("chunk-")[0]).glob("chunk-*/file-*.parquet"))
        self._rows = [row for path in files for row in _rows(path)]
        self._rows.sort(key=lambda row: row["episode_index"])
        if len(self._rows) != self.info.episodes:
            raise InputError(f"tells of {len(self._rows)} episodes, and counts {self.info.episodes}", item=str(root))
        self._tasks = _tasks(root / TASKS)

    def __len__(self) -> int:
        return len(self._rows)

    def length(self, episode: int) -> int:
        """How many frames an episode has. Raises InputError for one that there is not."""
        return int(self._row(episode)["length"])

    def tasks(self, episode: int) -> list[str]:
        """What was to be done, frame by frame."""
        return [self._tasks[int(number)] for number in self.numbers(episode, "task_index").tolist()]

    def numbers(self, episode: int, feature: str) -> Float[Tensor, "t *n"]:
        """A feature's numbers, as they stand there: a row a frame, or a number. Raises InputError for other features."""
        found = self._feature(feature)
        if found.picture or found.dtype == "string":
            raise InputError(f"is {found.dtype}, no numbers", item=feature)
        column = self._table(episode, feature).column(feature).combine_chunks()
        if not pa.types.is_primitive(column.type):
            return torch.from_numpy(np.array(column.to_pylist(), np.float64)).reshape(len(column), *found.shape)
        return torch.from_numpy(np.array(column.to_pylist(), np.float64))

    def pictures(self, episode: int, feature: str) -> Iterator[Image]:
        """A camera's pictures, in order. Raises InputError for a feature that is no camera's, and where one is missing or damaged."""
        found, row = self._feature(feature), self._row(episode)
        if found.dtype == "image":
            for entry in self._table(episode, feature).column(feature).to_pylist():
                yield load_image(BytesIO(entry["bytes"]))
            return
        if found.dtype != "video":
            raise InputError(f"is {found.dtype}, no pictures", item=feature)
        chunk, file, begin = (row[f"videos/{feature}/{part}"] for part in ("chunk_index", "file_index", "from_timestamp"))
        path = placed(self.root, self.info.video, chunk, file, feature)
        for frame in frames_between(path, begin, int(row["length"]), self.info.fps):
            yield Image(torch.from_numpy(frame).permute(2, 0, 1).contiguous(), feature)

    def _row(self, episode: int) -> Mapping[str, Any]:
        if not 0 <= episode < len(self._rows):
            raise InputError(f"there is no episode {episode}; there are {len(self._rows)}", item=str(self.root))
        return self._rows[episode]

    def _feature(self, name: str) -> Feature:
        if name not in self.info.features:
            raise InputError(f"there is no such feature; there is {', '.join(self.info.features)}", item=name)
        return self.info.features[name]

    def _table(self, episode: int, feature: str) -> pa.Table:
        """One column of an episode's frames."""
        row = self._row(episode)
        path = placed(self.root, self.info.data, row["data/chunk_index"], row["data/file_index"])
        try:
            table = pq.read_table(path, columns=["episode_index", feature], filters=[("episode_index", "=", row["episode_index"])])
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"cannot be read: {error}", item=str(path)) from None
        if table.num_rows != row["length"]:
            raise InputError(f"has {table.num_rows} frames of episode {episode}, expected {row['length']}", item=str(path))
        return table


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        names = [name for name in pq.read_schema(path).names if not name.startswith("stats/")]
        rows: list[dict[str, Any]] = pq.read_table(path, columns=names).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot be read: {error}", item=str(path)) from None
    return rows


def _tasks(path: Path) -> dict[int, str]:
    """Tasks by number. Older writers give the index no name."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot be read: {error}", item=str(path)) from None
    names = [name for name in table.column_names if name != "task_index"]
    if len(names) != 1 or len(table.column_names) != 2:
        raise InputError(f"has the columns {', '.join(table.column_names)}, expected task_index and the tasks", item=str(path))
    tasks = table.column(names[0]).to_pylist()
    return {int(number): str(task) for number, task in zip(table.column("task_index").to_pylist(), tasks, strict=True)}
