"""Training of the robot policy at toy length: what is learned from, the same run whether interrupted or not, and the file that ships."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmsdk.apps.train_robot.demonstrations import Demonstration, save
from mmsdk.apps.train_robot.features import basis, encoded
from mmsdk.apps.train_robot.learn import Class, Learner, Recipe, errors, learn
from mmsdk.apps.train_robot.lessons import Lessons, Phrases, statistics_of, where_of
from mmsdk.errors import InputError, ModelError, WeightsError
from mmsdk.models.mini.family import Mini
from mmsdk.vla.default import Learned, action_network, read_learned, write_learned
from mmsdk.vla.envs.metaworld import sawyer
from mmsdk.vla.heads.glance import Glance, GlanceConfig

CONFIG = GlanceConfig(vision=10, kept=6, place=5, words=7, width=16, heads=2, inner=24, queries=2, looks=1, layers=1)
RECIPE = Recipe(steps=6, seeing=2, rows=6, warmup=1, dark=0.2)
CHUNK = 4


def demonstration(steps: int, seed: int) -> Demonstration:
    """A picture each second step; actions that count the steps."""
    generator = torch.Generator().manual_seed(seed)
    taken = torch.arange(0, steps, 2)
    pictures = torch.randint(0, 256, (len(taken), 2, 3, 56, 56), generator=generator, dtype=torch.uint8)
    actions = torch.arange(float(steps))[:, None].expand(-1, 4) + 100 * seed
    return Demonstration(pictures, taken, torch.randn(steps, 4, generator=generator), actions, torch.rand(steps, 6, generator=generator))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("demonstrations")
    for number, name in enumerate(("push", "pull")):
        save([demonstration(7, 2 * number), demonstration(5, 2 * number + 1)], folder / name)
    return [folder / "push", folder / "pull"]


@pytest.fixture(scope="module")
def room(shards: list[Path]) -> Class:
    generator = torch.Generator().manual_seed(0)
    looks = [torch.randn(7, 2, 3, CONFIG.kept, generator=generator).half() for _ in shards]
    lessons = Lessons.of(looks, shards, CHUNK)
    phrases = Phrases(torch.randn(2, 3, 4, 7, generator=generator), torch.ones(2, 3, 4, dtype=torch.bool))
    return Class(lessons, phrases, torch.randn(6, 5, generator=generator), torch.zeros(6, CONFIG.kept), statistics_of(lessons))


def learner(recipe: Recipe = RECIPE) -> Learner:
    torch.manual_seed(0)
    return Learner.of(Glance(CONFIG), action_network(CONFIG, CHUNK, sawyer()), recipe)


def test_a_look_is_followed_by_the_actions_of_its_own_demonstration(room: Class) -> None:
    lessons = room.lessons
    assert lessons.tasks.tolist() == [0] * 7 + [1] * 7
    # 7 steps with pictures at 0, 2, 4, 6, then 5 steps with pictures at 0, 2, 4
    assert lessons.chunks[:7, :, 0].tolist() == [
        [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 6], [6, 6, 6, 6], [100, 101, 102, 103], [102, 103, 104, 104], [104, 104, 104, 104],
    ]  # fmt: skip
    assert lessons.valid[:7].sum(1).tolist() == [4, 4, 3, 1, 4, 3, 1]
    assert lessons.held.tolist() == [False] * 4 + [True] * 3 + [False] * 4 + [True] * 3
    counted = room.statistics["action"]["mean"]
    torch.testing.assert_close(counted[0], lessons.chunks[lessons.valid][:, 0].double().mean())


def test_where_things_are_is_told_from_the_table_and_from_the_hand() -> None:
    places, states = torch.tensor([[0.1, 0.8, 0.2, 0.0, 0.7, 0.1]]), torch.tensor([[0.1, 0.6, 0.2, 1.0]])
    expected = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, -1.0, 1.0, -1.0]])
    torch.testing.assert_close(where_of(places, states), expected, atol=1e-5, rtol=0)


def test_a_run_in_pieces_is_the_run_in_one(room: Class, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    once = dict(learn(room, learner(), RECIPE, whole, every=4))
    running = learn(room, learner(), RECIPE, pieces, every=4)
    # stopped from outside, as by a deadline, behind a checkpoint
    first = dict(next(running) for _ in range(5))
    running.close()
    rest = dict(learn(room, learner(), RECIPE, pieces, every=4))
    assert list(rest) == [6] and first | rest == once
    ours, theirs = load_file(whole), load_file(pieces)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(InputError, match="it was made by .*rows=6"):
        list(learn(room, learner(), replace(RECIPE, rows=5), pieces))


def test_seeing_comes_first_and_both_losses_fall(room: Class, tmp_path: Path) -> None:
    recipe = Recipe(steps=90, seeing=30, rows=14, warmup=1, rate=3e-3, dark=0.0, prefix=0)
    told = dict(learn(room, learner(recipe), recipe, tmp_path / "checkpoint", every=1000))
    assert all(told[step]["act"] == 0 for step in range(1, 31))
    assert told[30]["where"] < 0.85 * told[1]["where"]
    early, late = (sum(told[step]["act"] for step in steps) for steps in (range(31, 41), range(81, 91)))
    assert late < 0.8 * early
    rows = errors(room, learner(recipe).mean[0])
    assert [row["task"] for row in rows] == [0, 1] and all(row["thing"] > 0 for row in rows)


def test_features_are_encoded_once_and_span_what_differs(shards: list[Path], small: Mini, tmp_path: Path) -> None:
    encoder = small.encoder
    found = basis(tmp_path / "basis", encoder, shards, kept=8)
    features = encoded(tmp_path / "features", "push", shards[0], encoder, found)
    assert features.shape[:2] == (7, 2) and features.shape[3] == 8 and features.dtype == torch.float16
    spread = features.float().flatten(0, 2).var(0)
    assert bool((spread[:-1] > 0.5 * spread[1:]).all()), "directions in falling order of their variance"
    (shard,) = (tmp_path / "features").iterdir()
    written = shard.stat().st_mtime_ns
    torch.testing.assert_close(encoded(tmp_path / "features", "push", shards[0], encoder, found), features)
    assert shard.stat().st_mtime_ns == written
    again = basis(tmp_path / "basis", encoder, [], kept=8)
    assert torch.equal(again.axes, found.axes) and again.black.shape == features.shape[2:]


def test_what_ships_is_what_was_learned(room: Class, tmp_path: Path) -> None:
    made, path = learner(), tmp_path / "policy.safetensors"
    write_learned(path, Learned(made.glance, made.network, room.statistics, "seed 0"))
    found = read_learned(path)
    assert found.made == "seed 0" and found.glance.config == CONFIG and found.network.chunk == CHUNK
    for ours, theirs in ((found.glance, made.glance), (found.network, made.network)):
        assert all(torch.equal(tensor, theirs.state_dict()[name].half().float()) for name, tensor in ours.state_dict().items())
    torch.testing.assert_close(found.statistics["state"]["std"], room.statistics["state"]["std"])
    with pytest.raises(WeightsError, match=r"missing or damaged.*mmsdk.apps.train_robot"):
        read_learned(tmp_path / "nothing.safetensors")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(WeightsError, match="missing or damaged"):
        read_learned(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match="does not say what it holds"):
        read_learned(path)
