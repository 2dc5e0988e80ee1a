"""Datasets as lerobot's v3.0 lays them out, read back by pyarrow and PyAV on one side and by our reader on the other."""

import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pyarrow.parquet as pq
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.contract import Camera, Command, Contract, Feature
from mmsdk.vla.contract_file import load_contract
from mmsdk.vla.lerobot.layout import placed
from mmsdk.vla.lerobot.reader import Dataset
from mmsdk.vla.lerobot.writer import DatasetWriter
from mmsdk.vla.statistics import read_statistics
from mmsdk.vla.types import Observation, Stamp

JOINTS = Feature("joints", "joint", 2, "rad", (-3.0,) * 2, (3.0,) * 2)
HAND = Feature("hand", "gripper", 1, "fraction", (0.0,), (1.0,), opened=1.0, closed=0.0)
ROBOT = Contract(
    "two joints",
    10.0,
    (Camera("front", 48, 64, "rgb", "hwc"),),
    (JOINTS,),
    (Command(JOINTS, "position", "absolute", "joints"), Command(HAND, "position", "step")),
)
LENGTHS = (5, 3, 4)


def picture(number: int) -> torch.Tensor:
    """A smooth picture that says which it is by its colour."""
    ramp = torch.linspace(0, 60, 64).expand(3, 48, 64)
    colour = torch.tensor([20 + 14 * number, 180 - 10 * number, 60.0])[:, None, None]
    return (ramp + colour).round().to(torch.uint8)


def seen(number: int) -> Observation:
    state = torch.tensor([math.sin(number), 0.1 * number], dtype=torch.float64)
    return Observation({"front": Image(picture(number), "front")}, state, f"task {number // 8}", Stamp(float(number)))


def action(number: int) -> torch.Tensor:
    return torch.tensor([0.01 * number, -0.02 * number, 0.5])


def write(root: Path, video: bool, largest: int = 2**30) -> None:
    number = 0
    with DatasetWriter(root, ROBOT, video, largest) as dataset:
        for length in LENGTHS:
            for _ in range(length):
                dataset.add(seen(number), action(number))
                number += 1
            dataset.end_episode()


@pytest.fixture(scope="module", params=[True, False], ids=["video", "pictures"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lerobot") / "cups"
    write(path, request.param)
    return path


def test_the_layout_is_the_published_one(root: Path) -> None:
    """The keys and paths of info.json, the columns of the tables, and pandas' index, as lerobot writes them."""
    info = json.loads((root / "meta" / "info.json").read_text(encoding="utf-8"))
    video = info["video_path"] is not None
    assert (
        list(info)
        == (
            "codebase_version robot_type total_episodes total_frames total_tasks chunks_size data_files_size_in_mb video_files_size_in_mb "
            "fps splits data_path video_path features"
        ).split()
    )
    assert (info["codebase_version"], info["fps"], info["total_episodes"], info["total_frames"], info["total_tasks"]) == (
        "v3.0",
        10,
        3,
        12,
        2,
    )
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet" and info["splits"] == {"train": "0:3"}
    front = info["features"]["observation.images.front"]
    assert front["dtype"] == ("video" if video else "image") and front["shape"] == [48, 64, 3]
    assert info["features"]["action"] == {"dtype": "float32", "shape": [3], "names": ["joints[0]", "joints[1]", "hand[0]"]}
    assert {name: each["dtype"] for name, each in info["features"].items() if each["shape"] == [1]} == {
        "timestamp": "float32",
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
    }
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert {"data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "meta/stats.json"} <= files
    assert ("videos/observation.images.front/chunk-000/file-000.mp4" in files) is video
    pandas = json.loads(pq.read_schema(root / "meta" / "tasks.parquet").metadata[b"pandas"])
    assert pandas["index_columns"] == ["task"]
    assert load_contract(root / "meta" / "contract.yaml") == ROBOT


def test_the_tables_hold_what_was_done(root: Path) -> None:
    rows = pq.read_table(root / "data" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(12)) and [row["episode_index"] for row in rows] == [0] * 5 + [1] * 3 + [2] * 4
    assert [row["frame_index"] for row in rows] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert [row["timestamp"] for row in rows[:5]] == [float(np.float32(step / 10)) for step in range(5)]
    for number, row in enumerate(rows):
        assert row["action"] == action(number).tolist() and row["observation.state"] == seen(number).state.float().tolist()
    episodes = pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"], row["length"]) for row in episodes] == [(0, 5, 5), (5, 8, 3), (8, 12, 4)]
    assert [row["tasks"] for row in episodes] == [["task 0"], ["task 0"], ["task 1"]]
    assert episodes[1]["stats/action/max"] == pytest.approx([0.07, -0.1, 0.5]) and episodes[1]["stats/action/count"] == [3]
    assert np.shape(episodes[0]["stats/observation.images.front/mean"]) == (3, 1, 1)


def test_the_statistics_are_those_of_all_frames(root: Path) -> None:
    told = read_statistics(root / "meta" / "stats.json")
    every = np.stack([action(number).numpy() for number in range(12)]).astype(np.float64)
    for name, reduce in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        np.testing.assert_allclose(told["action"][name], reduce(every, axis=0), atol=1e-9)
    stats = json.loads((root / "meta" / "stats.json").read_text(encoding="utf-8"))
    pixels = np.stack([picture(number).numpy() for number in range(12)]) / 255
    np.testing.assert_allclose(np.ravel(stats["observation.images.front"]["mean"]), pixels.mean((0, 2, 3)), atol=1e-9)
    np.testing.assert_allclose(np.ravel(stats["observation.images.front"]["std"]), pixels.std((0, 2, 3)), atol=1e-9)


def test_pictures_are_where_lerobot_looks_for_them(root: Path) -> None:
    """In the table as bytes of a PNG, or in the video at from_timestamp + frame / fps, found by PyAV from the file's beginning."""
    rows = pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    path = root / "videos" / "observation.images.front" / "chunk-000" / "file-000.mp4"
    if not path.exists():
        table = pq.read_table(root / "data" / "chunk-000" / "file-000.parquet").to_pylist()
        for number, row in enumerate(table):
            found = np.asarray(PIL.Image.open(BytesIO(row["observation.images.front"]["bytes"])))
            assert np.array_equal(found, picture(number).permute(1, 2, 0).numpy())
        return
    with av.open(str(path)) as container:
        shown = {round(frame.time * 10): frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}
    assert len(shown) == 12 and rows[2]["videos/observation.images.front/from_timestamp"] == pytest.approx(0.8)
    assert rows[2]["videos/observation.images.front/to_timestamp"] == pytest.approx(1.2)
    for number in range(12):
        wanted = picture(number).permute(1, 2, 0).numpy().astype(int)
        assert np.abs(shown[number].astype(int) - wanted).mean() < 4


def test_our_reader_gives_back_what_was_written(root: Path) -> None:
    dataset, number = Dataset(root), 0
    assert len(dataset) == 3 and dataset.info.robot == "two joints"
    for episode, length in enumerate(LENGTHS):
        assert dataset.length(episode) == length
        actions, states = dataset.numbers(episode, "action"), dataset.numbers(episode, "observation.state")
        pictures = list(dataset.pictures(episode, "observation.images.front"))
        assert actions.shape == (length, 3) and len(pictures) == length
        assert dataset.tasks(episode) == [f"task {(number + step) // 8}" for step in range(length)]
        for step in range(length):
            assert torch.equal(actions[step], action(number).double()) and torch.equal(states[step], seen(number).state.float().double())
            assert (pictures[step].pixels.float() - picture(number).float()).abs().mean() < 4
            number += 1


def test_large_files_are_followed_by_others(tmp_path: Path) -> None:
    write(tmp_path / "cups", video=True, largest=1)
    files = sorted(path.name for path in (tmp_path / "cups" / "data").rglob("*.parquet"))
    dataset = Dataset(tmp_path / "cups")
    assert files == ["file-000.parquet", "file-001.parquet", "file-002.parquet"]
    assert len(list((tmp_path / "cups" / "videos").rglob("*.mp4"))) == 3
    assert [dataset.numbers(episode, "index").tolist() for episode in range(3)] == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]]
    shades = [int(image.pixels[0, 0, 0]) for episode in range(3) for image in dataset.pictures(episode, "observation.images.front")]
    assert shades == pytest.approx([20 + 14 * number for number in range(12)], abs=6)


def test_what_does_not_fit_is_refused_and_not_added(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "cups", ROBOT, video=False) as dataset:
        with pytest.raises(InputError, match="an episode without frames"):
            dataset.end_episode()
        dataset.add(seen(0), action(0))
        for wrong, message in (
            ((seen(1), torch.zeros(2)), r"action: \(2,\) numbers, expected 3"),
            ((seen(1), torch.tensor([0.0, math.nan, 0.0])), "all of them finite"),
            ((Observation({}, seen(1).state, "", Stamp(0.0)), action(1)), "observation.images.front: no picture"),
            (
                (Observation({"front": Image(torch.zeros(3, 8, 8, dtype=torch.uint8))}, seen(1).state, "", Stamp(0.0)), action(1)),
                r"\(8, 8\)",
            ),
        ):
            with pytest.raises(InputError, match=message):
                dataset.add(*wrong)
        dataset.end_episode()
    assert Dataset(tmp_path / "cups").length(0) == 1
    with pytest.raises(InputError, match="no dataset can be made there"):
        DatasetWriter(tmp_path / "cups", ROBOT)
    with pytest.raises(InputError, match="12.5 frames a second"):
        DatasetWriter(tmp_path / "half", Contract("r", 12.5, (), (JOINTS,), ROBOT.action))
    odd = Contract("odd", 10.0, (Camera("front", 47, 64, "rgb", "hwc"),), ROBOT.state, ROBOT.action)
    with pytest.raises(InputError, match="observation.images.front: videos have even sides"):
        DatasetWriter(tmp_path / "odd", odd)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"codebase_version": "v2.1"}, "is of version 'v2.1', expected 'v3.0'"),
        ({"fps": "ten"}, "is damaged"),
        ({"fps": 0}, "is damaged"),
        ({"total_episodes": 4}, "tells of 3 episodes, and counts 4"),
        ({"data_path": "../outside/file-{file_index:03d}.parquet"}, "leads out of it"),
    ],
)
def test_datasets_that_are_damaged_are_told(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    write(tmp_path / "cups", video=False)
    path = tmp_path / "cups" / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(InputError, match=told):
        Dataset(tmp_path / "cups").numbers(0, "action")


def test_patterns_hold_values_and_nothing_else(tmp_path: Path) -> None:
    assert placed(tmp_path, "a/{chunk_index:03d}/{video_key}-{file_index}.mp4", 1, 22, "x") == tmp_path / "a" / "001" / "x-22.mp4"
    assert placed(tmp_path, "{chunk_index.__class__}", 1, 2).name == "{chunk_index.__class__}"
    with pytest.raises(InputError, match="leads out"):
        placed(tmp_path, "{video_key}", 0, 0, "../../etc")
