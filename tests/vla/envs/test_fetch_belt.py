"""The Fetch arm over a belt, simulated and drawn in a process of its own: the tasks can be done, but not from one old picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmsdk.apps.train_mini.needs import check_rendering, screenless
from mmsdk.errors import InputError

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
import numpy as np
import torch
from mmsdk.vla.envs.belt import LIMIT
from mmsdk.vla.envs.fetch_belt import FetchBelts, Stage, draw
from mmsdk.vla.envs.fetch_expert import expert
from mmsdk.vla.envs.fetch_scene import View
from mmsdk.vla.envs.fetch_sizes import CENTRE, REST

stage = Stage.made()
view = View(stage.model)
home = torch.tensor([*CENTRE, REST])

def episodes(n, seed=5):
    return draw(torch.arange(n) % 2 == 1, torch.Generator().manual_seed(seed))

def acted(belts, decide, look=()):
    seen = {}
    for step in range(LIMIT):
        if step in look:
            seen[step] = belts.pictures(view), belts.shown.clone(), belts.lamps.clone()
        belts.apply(decide(belts))
        if not belts.running.any():
            break
    return seen

def stale(belts):
    at = belts.shown.gather(1, belts.episodes.wanted[:, None, None].expand(-1, 1, 3))[:, 0] - home
    near = (belts.hands - home - at)[:, :2].norm(dim=1) < 0.012
    low = torch.where(near, 0.423 - REST, 0.0)
    shut = torch.where(near & (belts.hands[:, 2] < 0.44), 1.0, -1.0)
    lift = torch.where(belts.holding, 0.0, low)
    return torch.stack((at[:, 0], at[:, 1], lift, torch.where(belts.closing, 1.0, shut)), dim=1)

def blocks(belts):
    lane = belts.episodes.lane.gather(1, belts.episodes.wanted[:, None])[:, 0]
    return torch.stack((lane, torch.zeros(len(belts)), torch.full((len(belts),), 0.423 - REST), torch.ones(len(belts))), dim=1)

done = FetchBelts(stage, episodes(8))
seen = acted(done, expert, (0, 20, 30))
late, still, hostile = FetchBelts(stage, episodes(6)), FetchBelts(stage, episodes(6)), FetchBelts(stage, episodes(2))
acted(late, stale)
acted(still, blocks)
acted(hostile, lambda belts: torch.full((2, 4), float("nan")))
wanted = still.episodes.wanted[:, None]
towards = still.episodes.place.gather(1, wanted)[:, 0] * still.episodes.speed < 0
reached = (hostile.hands - home).norm(dim=1).max()
print(json.dumps({
    "expert": done.outcome, "late": late.outcome, "blocks": still.outcome, "towards": towards.tolist(),
    "cued": done.episodes.cued.tolist(), "wanted": done.episodes.wanted.tolist(), "there": done.episodes.there.tolist(),
    "drift": float(reached), "hostile": hostile.outcome,
    "speed": ((done._were[25] - done._were[0])[..., 1] / 1.0).tolist(), "told": done.episodes.speed.tolist(),
}))
names = "picture", "place", "lamp"
np.savez(sys.argv[1], **{f"{name}{step}": value.numpy() for step, values in seen.items() for name, value in zip(names, values)})
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[str, np.ndarray]]:
    """What the program told, and what it saw; without simulator or OpenGL it is skipped with the way to have them, and in CI it fails."""
    try:
        check_rendering()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("belt") / "seen.npz"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], env=screenless(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(path) as file:
        return json.loads(done.stdout), dict(file)


def test_the_script_picks_the_right_thing_and_a_late_eye_alone_does_not(ran: tuple[dict, dict[str, np.ndarray]]) -> None:
    told, _ = ran
    assert set(told["expert"]) == {"picked"}
    assert "picked" not in told["late"]


def test_a_hand_that_stands_in_the_way_is_a_failure(ran: tuple[dict, dict[str, np.ndarray]]) -> None:
    told, _ = ran
    met = [way for way, towards in zip(told["blocks"], told["towards"], strict=True) if towards]
    assert met and set(met) == {"stalled"}
    assert "picked" not in told["blocks"]


def test_commands_that_are_no_numbers_leave_the_hand_where_it_waits(ran: tuple[dict, dict[str, np.ndarray]]) -> None:
    told, _ = ran
    assert told["drift"] < 0.01 and "picked" not in told["hostile"]


def test_things_come_at_the_speed_that_was_drawn(ran: tuple[dict, dict[str, np.ndarray]]) -> None:
    told, _ = ran
    for moved, speed, there in zip(told["speed"], told["told"], told["there"], strict=True):
        assert 0.15 <= abs(speed) <= 0.25
        assert [abs(went - speed) < 1e-3 for went, is_there in zip(moved, there, strict=True) if is_there] == [True] * sum(there)


def test_the_lamp_shows_the_wanted_colour_at_first_and_no_longer(ran: tuple[dict, dict[str, np.ndarray]]) -> None:
    told, seen = ran
    for row, (cued, wanted) in enumerate(zip(told["cued"], told["wanted"], strict=True)):
        assert seen["lamp0"][row] == (wanted if cued else -1) and seen["lamp30"][row] == -1
        corner = seen["picture0"][row][:, :12, 6:15]
        red, blue = (float((corner[this] - corner[other] > 0.5).mean()) for this, other in ((0, 2), (2, 0)))
        assert (red > 0.05, blue > 0.05) == (cued and wanted == 0, cued and wanted == 1)


def test_things_are_drawn_where_they_were_a_third_of_a_second_ago(ran: tuple[dict, dict[str, np.ndarray]]) -> None:
    told, seen = ran
    looked = 0
    for step in (20, 30):
        for row, there in enumerate(told["there"]):
            for thing, (this, other) in enumerate(((0, 2), (2, 0))):
                along = seen[f"place{step}"][row, thing, 1] - 0.75
                if not there[thing] or abs(along) > 0.4:
                    continue
                picture = seen[f"picture{step}"][row][:, 12:]
                mass = (picture[this] - picture[other] > 0.5).sum(0)
                column = float((mass * np.arange(len(mass))).sum() / mass.sum())
                # 0.54 m to either side at the distance of the middle; the lanes are a little nearer or farther
                assert abs((column - 47.5) / 48 * 0.54 - along) < 0.035, (step, row, thing)
                looked += 1
    assert looked > 3
