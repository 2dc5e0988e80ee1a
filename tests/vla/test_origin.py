"""What a checkpoint was made with, proved at load, and that nothing which is read for a robot can run. VR-18, VR-26."""

import json
import pickle
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mmsdk.errors import InputError, MmsdkError, ModelError, WeightsError
from mmsdk.vision.types import Image
from mmsdk.vla.contract import Command, Contract, Feature
from mmsdk.vla.contract_file import load_contract
from mmsdk.vla.lint import Normalization
from mmsdk.vla.origin import Origin, differing, installed, prove, read_origin, write_origin
from mmsdk.vla.policy import load_policy
from mmsdk.vla.statistics import read_statistics
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp
from mmsdk.weights.safetensors import open_checkpoint


class Linear:
    """A model whose answer hangs on everything that it is asked, the seed too; `gain` is what another library gets wrong."""

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain

    def reset(self, episode: int) -> None:
        del episode

    def __call__(self, request: Request) -> ActionChunk:
        observation = request.observation
        noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(observation.stamp.seed))
        seen = sum(float(image.pixels.float().mean()) for image in observation.images.values()) / 255 + len(observation.instruction)
        return ActionChunk(self.gain * (noise + observation.state[:2] + seen) + request.pending.sum(), observation.stamp)


def asked() -> Request:
    picture = Image(torch.arange(48, dtype=torch.uint8).view(3, 4, 4), "base")
    return Request(Observation({"base": picture}, torch.tensor([0.25, -0.5]), "open it", Stamp(0.0, 0, 1, seed=7)), torch.ones(1, 2), 2)


def made(**versions: str) -> Origin:
    return Origin(versions or {"torch": version("torch")}, asked(), Linear()(asked()).actions)


def test_vr_26_a_record_comes_back_from_its_files(tmp_path: Path) -> None:
    write_origin(made(), tmp_path)
    origin = read_origin(tmp_path)
    assert origin.versions == {"torch": version("torch")} and torch.equal(origin.actions, made().actions)
    assert torch.equal(origin.request.observation.images["base"].pixels, asked().observation.images["base"].pixels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prove(Linear(), origin)


def test_vr_26_another_version_is_told_and_another_answer_is_refused() -> None:
    old = made(torch="1.0.0", nowhere_to_be_found="2.1")
    told = f"torch: made with 1.0.0, here is {version('torch')}; nowhere_to_be_found: made with 2.1, here is none"
    with pytest.warns(UserWarning, match=f"made with other versions; {told}".replace("+", r"\+")):
        prove(Linear(), old)
    with pytest.raises(ModelError, match=r"answer to its parity vector differs by .*, allowed 0\.001"):
        prove(Linear(gain=1.01), made())
    with pytest.raises(ModelError, match="differs by nan"):
        prove(Linear(gain=float("nan")), made())
    assert differing({"torch": version("torch")}) == [] and installed("nowhere_to_be_found") == ""


def test_vr_26_a_policy_is_loaded_only_if_it_answers_as_it_did() -> None:
    joints = Feature("joints", "joint", 2, "rad", (-3.0,) * 2, (3.0,) * 2)
    robot = Contract("robot", 20.0, (), (joints,), (Command(joints, "position", "absolute", "joints"),))
    plain = Normalization("identity", "identity", {})
    assert load_policy(Linear(), robot, robot, plain, origin=made())
    with pytest.raises(ModelError, match="parity vector"):
        load_policy(Linear(gain=0.9), robot, robot, plain, origin=made())


def test_damaged_records_are_named(tmp_path: Path) -> None:
    write_origin(made(), tmp_path)
    (tmp_path / "origin.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsError, match=r"origin\.safetensors is missing or damaged"):
        read_origin(tmp_path)
    write_origin(made(), tmp_path)
    fields = json.loads((tmp_path / "origin.json").read_text())
    (tmp_path / "origin.json").write_text(json.dumps({**fields, "seed": "seven"}))
    with pytest.raises(ModelError, match="seed"):
        read_origin(tmp_path)


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_vr_18_a_pickle_is_refused_by_all_that_reads_for_a_robot_and_never_run(tmp_path: Path) -> None:
    """Statistics, contract, record and checkpoint. That the pickle would do harm is tried out first."""
    trace = tmp_path / "trace"
    payload = pickle.dumps(Bomb(trace))
    pickle.loads(payload)
    assert trace.exists()
    trace.unlink()
    write_origin(made(), tmp_path)
    for name in ("statistics.json", "robot.yaml", "origin.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(payload)
    refusals: list[tuple[type[MmsdkError], str]] = []
    for read in (
        lambda: read_statistics(tmp_path / "statistics.json"),
        lambda: load_contract(tmp_path / "robot.yaml"),
        lambda: read_origin(tmp_path),
        lambda: open_checkpoint(tmp_path),
    ):
        with pytest.raises(MmsdkError) as caught:
            read()
        refusals.append((caught.type, str(caught.value)))
    assert [kind for kind, _ in refusals] == [WeightsError, InputError, WeightsError, WeightsError]
    assert "is a pickle" in refusals[-1][1] and not trace.exists()
