"""The Fetch arm of gymnasium-robotics at three tasks, moved by short scripts: reach, push, pick and place.

Run as a program by `renders.render`, in a process of its own: `python -m mmsdk.apps.train_mini.renders_fetch`.
"""

from collections.abc import Iterator

import gymnasium
import gymnasium_robotics
import mujoco
import numpy as np

from mmsdk.apps.train_mini.renders_stage import Camera, Part, Pose, Stage
from mmsdk.apps.train_mini.renders_suite import Episode, Plan, main, shoot

__all__ = ["ACTIONS", "episodes", "parts"]

STEPS = 90
FEWEST = 12  # moments; the goal of a shorter episode lay where the thing already was
ACTIONS = {"FetchReach": "reaching for a target", "FetchPush": "pushing a block", "FetchPickAndPlace": "picking up a block"}
_BODIES = {"object0": "block", "robot0:gripper_link": "gripper", "robot0:shoulder_pan_link": "robot arm", "table0": "table"}


def parts(model: "mujoco.MjModel") -> list[Part]:
    """Everything that has a name, what the task is about first."""
    found: dict[str, dict[int, str]] = {name: {} for name in _BODIES.values()}
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        while body and model.body(body).name not in _BODIES:
            body = int(model.body_parentid[body])
        if body:
            name = _BODIES[model.body(body).name]
            found[name][geom] = {"block": "black", "table": "white"}.get(name, _colour(model.geom_rgba[geom]))
    goal = Part("target", {model.site("target0").id: "red"}, site=True)
    things = [Part(name, geoms) for name, geoms in found.items() if geoms]
    return [goal, *things] if things[0].name != "block" else [things[0], goal, *things[1:]]


def _colour(rgba: np.ndarray) -> str:
    """Blue, white or grey: the only paints of this arm."""
    if rgba[2] - rgba[0] > 0.3:
        return "blue"
    return "white" if rgba[:3].mean() > 0.6 else "grey"


def _act(task: str, seen: dict[str, np.ndarray], memory: dict[str, float]) -> np.ndarray:
    """The script: where to move the hand (x y z), and whether to close the fingers."""
    hand, block, goal = seen["observation"][:3], seen["achieved_goal"], seen["desired_goal"]
    if task == "FetchReach":
        return _towards(hand, goal, -1.0, 1.5)
    return _push(hand, block, goal, memory) if task == "FetchPush" else _pick(hand, block, goal, memory)


def _towards(hand: np.ndarray, place: np.ndarray, fingers: float, gain: float = 6.0) -> np.ndarray:
    return np.array([*np.clip((place - hand) * gain, -1, 1), fingers], np.float32)


def _push(hand: np.ndarray, block: np.ndarray, goal: np.ndarray, memory: dict[str, float]) -> np.ndarray:
    way = (goal - block)[:2] / (np.linalg.norm((goal - block)[:2]) + 1e-6)
    start = np.array([*(block[:2] - 0.07 * way), block[2]])
    if not memory.get("over"):
        memory["over"] = bool(np.linalg.norm((hand - start)[:2]) < 0.015)
        return _towards(hand, start + np.array([0, 0, 0.09]), -1.0, 10.0)
    if not memory.get("down"):
        memory["down"] = bool(hand[2] - start[2] < 0.012)
        return _towards(hand, start, -1.0, 10.0)
    return _towards(hand, np.array([*(goal[:2] - 0.03 * way), block[2]]), -1.0, 5.0)


def _pick(hand: np.ndarray, block: np.ndarray, goal: np.ndarray, memory: dict[str, float]) -> np.ndarray:
    if not memory.get("over"):
        memory["over"] = bool(np.linalg.norm((hand - block)[:2]) < 0.01)
        return _towards(hand, block + np.array([0, 0, 0.08]), 1.0, 10.0)
    if not memory.get("down"):
        memory["down"] = bool(np.linalg.norm(hand - block) < 0.012)
        return _towards(hand, block, 1.0, 10.0)
    memory["held"] = memory.get("held", 0) + 1
    return _towards(hand, block if memory["held"] < 5 else goal, -1.0)


def _play(env: "gymnasium.Env", task: str, stage: Stage, seed: int) -> list[Pose] | None:
    """The moments of one episode up to a little after success; None where the script failed or had nothing to do."""
    seen, _ = env.reset(seed=seed)
    site = stage.model.site("target0").id
    stage.model.site_pos[site] = seen["desired_goal"] - (stage.data.site_xpos[site] - stage.model.site_pos[site])
    memory: dict[str, float] = {}
    poses, after = [stage.pose()], 0
    for _ in range(STEPS):
        seen, _, _, _, info = env.step(_act(task, seen, memory))
        poses.append(stage.pose())
        after += bool(info["is_success"]) or after > 0
        if after > 4:
            return poses if len(poses) >= FEWEST else None
    return None


def _camera(stage: Stage, rng: np.random.Generator) -> Camera:
    block = stage.parts[0]
    thing = stage.data.site_xpos if block.site else stage.data.geom_xpos
    at = 0.5 * thing[next(iter(block.colours))] + 0.5 * stage.data.site("robot0:grip").xpos + rng.normal(0, 0.04, 3)
    return Camera("", 0, (float(at[0]), float(at[1]), float(at[2])), rng.uniform(0.6, 1.3), rng.uniform(55, 305), rng.uniform(-60, -15))


def episodes(task: str, plan: Plan) -> Iterator[Episode]:
    """Pictures and a clip of each episode that `plan` asks for of one task."""
    gymnasium.register_envs(gymnasium_robotics)
    env = gymnasium.make(f"{task}-v4", max_episode_steps=STEPS + 1)
    env.reset(seed=plan.seed)
    model, data = env.unwrapped.model, env.unwrapped.data
    mocap = model.body("robot0:mocap").id
    model.geom_rgba[model.geom_bodyid == mocap, 3] = 0.0  # the handle that drags the arm: long green lines through the picture
    stage = Stage(model, data, parts(model), plan.size, np.random.default_rng([plan.seed, *task.encode()]))
    for index in range(len(plan.pictures)):
        yield _episode(env, task, stage, plan, index)
    stage.close()
    env.close()


def _episode(env: "gymnasium.Env", task: str, stage: Stage, plan: Plan, index: int) -> Episode:
    for attempt in range(9):
        poses = _play(env, task, stage, plan.seed + index + 1000 * attempt)
        if poses is None:
            continue
        stage.redress(0.15, sites=True, often=("block", "table"))
        episode = Episode("fetch", task, ACTIONS[task])
        made = shoot(episode, stage, plan, index, poses, lambda: _camera(stage, stage.rng), {stage.parts[0].name})
        if made is not None:
            return made
    raise RuntimeError(f"{task}: nine episodes gave no view of a success; is gymnasium-robotics 1.4.2 installed?")


if __name__ == "__main__":
    main(list(ACTIONS), episodes)
