"""The 50 Meta-World tasks, played by their scripted experts: what each shows, in everyday words, and the episodes themselves.

Run as a program by `renders.render`, in a process of its own: `python -m mmsdk.apps.train_mini.renders_metaworld`.
"""

import warnings
from collections.abc import Iterator, Mapping

import gymnasium
import metaworld  # noqa: F401  (its import is what adds the environments to gymnasium)
import mujoco
import numpy as np
from metaworld.policies import ENV_POLICY_MAP

from mmsdk.apps.train_mini.renders_stage import Camera, Part, Pose, Stage
from mmsdk.apps.train_mini.renders_suite import Episode, Plan, main, shoot

__all__ = ["ACTIONS", "episodes", "parts"]

STEPS = 480
ATTEMPTS = 9  # their seeds stay below the 10,000 that divides training from held-out scenes
ACTIONS = {
    "assembly": "putting a ring on a peg", "basketball": "putting a basketball in a hoop", "bin-picking": "moving a block to another bin",
    "box-close": "closing a box", "button-press": "pressing a button", "button-press-topdown": "pressing a button",
    "button-press-topdown-wall": "pressing a button", "button-press-wall": "pressing a button",
    "coffee-button": "pressing the button of a coffee machine", "coffee-pull": "pulling a mug away from a coffee machine",
    "coffee-push": "pushing a mug to a coffee machine", "dial-turn": "turning a dial", "disassemble": "taking a ring off a peg",
    "door-close": "closing a door", "door-lock": "locking a door", "door-open": "opening a door", "door-unlock": "unlocking a door",
    "drawer-close": "closing a drawer", "drawer-open": "opening a drawer", "faucet-close": "turning a faucet",
    "faucet-open": "turning a faucet", "hammer": "hammering a nail", "hand-insert": "putting a block into a hole",
    "handle-press": "pressing a handle down",
    "handle-press-side": "pressing a handle down", "handle-pull": "pulling a handle up", "handle-pull-side": "pulling a handle up",
    "lever-pull": "pulling a lever", "peg-insert-side": "inserting a peg into a box", "peg-unplug-side": "pulling out a plug",
    "pick-out-of-hole": "picking a puck out of a hole", "pick-place": "picking up a puck", "pick-place-wall": "picking up a puck",
    "plate-slide": "sliding a plate into a goal", "plate-slide-side": "sliding a plate into a goal",
    "plate-slide-back": "sliding a plate out of a goal", "plate-slide-back-side": "sliding a plate out of a goal",
    "push": "pushing a puck", "push-back": "pulling a block back", "push-wall": "pushing a puck", "reach": "reaching for a target",
    "reach-wall": "reaching for a target", "shelf-place": "putting a block on a shelf", "soccer": "pushing a ball into a goal",
    "stick-pull": "pulling a bottle with a stick", "stick-push": "pushing a bottle with a stick", "sweep": "sweeping a block off the table",
    "sweep-into": "sweeping a block into a hole", "window-close": "closing a window", "window-open": "opening a window",
}  # fmt: skip

# Which body (or body/material) is called what; the first name is what the task is about. "#2" tells two things of one name apart.
_DOOR = {"door_link/dl_metal2": "door", "door_link/dl_metal": "handle", "lock_link": "lock", "doorlockA": "cabinet", "doorlockB": "cabinet"}
_PUCK = {"obj": "puck", "wall": "wall"}
_BLOCK = {"obj": "block"}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "assembly": {"asmbly_peg/asmbly_metal": "ring", "asmbly_peg/asmbly_green": "handle", "peg": "peg"},
    "basketball": {"basketball": "basketball", "hooplink": "hoop", "backboardlink": "backboard"},
    "bin": {"objA": "block", "binA": "bin", "binB": "bin#2"},
    "box": {"top_link/box_wood": "lid", "top_link/box_metal": "handle", "box": "box"},
    "button": {"button/btn_red": "button", "button": "box", "buttonbox": "box", "wall": "wall"},
    "coffee": {"mug": "mug", "cm_link": "coffee machine", "cmbutton": "button"},
    "dial": {"dial": "dial"},
    "door": _DOOR,
    "drawer": {"drawer_link/drawer_beige": "drawer", "drawer_link/drawer_white": "handle", "drawercase_link": "cabinet"},
    "faucet": {"faucet_link2/faucet_red": "handle", "faucetBase": "faucet"},
    "hammer": {"hammer": "hammer", "nail_link": "nail", "hammerblock": "box"},
    "handle": {"handle_link/hdlprs_red": "handle", "box": "box"},
    "lever": {"lever_link1/lever_blue": "knob", "lever_link1": "lever"},
    "peg-insert": {"peg": "peg", "box": "box"},
    "peg-unplug": {"plug": "plug", "plug_wall": "socket"},
    "pick": _PUCK, "reach": _PUCK, "push": _PUCK, "push-back": _BLOCK, "sweep": _BLOCK, "hand-insert": _BLOCK,
    "plate": {"puck_channel": "plate", "puck_goal": "goal"},
    "shelf": {"obj": "block", "shelf": "shelf"},
    "soccer": {"soccer_ball": "ball", "soccer_goal": "goal"},
    "stick": {"stick": "stick", "object": "bottle"},
    "window": {"windowb_a/window_white": "handle", "window": "window"},
}  # fmt: skip
_NAMES = {**_NAMES, "disassemble": _NAMES["assembly"]}
_COLOURS = {
    "asmbly_metal": "grey", "asmbly_green": "green", "bskt_orange": "orange", "bskt_black": "black", "bskt_white": "white",
    "bskt_red": "red", "bskt_metal": "grey", "obj_green": "green", "bin_red": "red", "bin_blue": "blue", "box_wood": "brown",
    "box_metal": "black", "btn_black": "black", "btn_metal": "grey", "btn_yellow": "yellow", "btn_red": "red", "wall_brick": "brown",
    "cmwhite": "white", "cmgrey": "grey", "dial_metal": "black", "dl_metal": "grey", "drawer_beige": "green", "drawer_white": "white",
    "faucet_metal": "grey", "faucet_red": "red", "hmr_red": "red", "hmr_metal": "grey", "hmr_wood": "brown", "block_wood": "brown",
    "hdlprs_red": "red", "hdlprs_metal0": "grey", "hdlprs_black": "black", "lever_metal0": "grey", "lever_metal1": "grey",
    "lever_blue": "blue", "peg_block_red": "red", "peg_block_wood": "brown", "plug_black": "black", "puck_black": "black",
    "puck_white": "white", "puck_red": "red", "shelf_wood": "brown", "soccer_white": "white", "soccer_black": "black",
    "soccer_blue": "blue", "stick_blue": "blue", "therm_metal": "grey", "therm_metal_green": "green", "window_white": "white",
}  # fmt: skip
_ALWAYS = {"hand": "gripper", "right_arm_base_link": "robot arm", "tablelink": "table", "base": None, "RetainingWall": None}
_PLAIN = {"peg-insert-side": "green", "shelf-place": "blue"}  # things without a material
_TEXTURED = {"puck": "red", "peg": "red"}  # whose material says less than its texture
_VIEWS = (("corner", 2), ("corner2", 2), ("corner3", 2), ("topview", 0))  # the corner cameras hang upside down


def _named(task: str) -> Mapping[str, str]:
    fits = [key for key in _NAMES if task == key or task.startswith(key + "-")]
    return _NAMES[max(fits, key=len)]


def _call(model: "mujoco.MjModel", geom: int, names: Mapping[str, str]) -> str | None:
    """What a geom belongs to: the nearest named body above it wins, with its material if the names ask for that."""
    material = _material(model, geom)
    body = int(model.geom_bodyid[geom])
    while body:
        name = model.body(body).name
        found = names.get(f"{name}/{material}") or names.get(name)
        if found or name in _ALWAYS:
            return found or _ALWAYS[name]
        body = int(model.body_parentid[body])
    return "table" if material == "table_wood" else None  # the top with a hole in it has no name


def _material(model: "mujoco.MjModel", geom: int) -> str:
    index = int(model.geom_matid[geom])
    return str(model.mat(index).name) if index >= 0 else ""


def parts(model: "mujoco.MjModel", task: str) -> list[Part]:
    """Everything of a task that has a name, what the task is about first."""
    names = _named(task)
    found: dict[str, dict[int, str]] = {name: {} for name in [*names.values(), "gripper", "robot arm", "table"]}
    for geom in range(model.ngeom):
        name = _call(model, geom, names) if model.geom_group[geom] <= 2 else None
        if name is None:
            continue
        found[name][geom] = _colour(name, _material(model, geom), task)
    things = [Part(name, geoms) for name, geoms in found.items() if geoms]
    goals = [i for i in range(model.nsite) if model.site(i).name == "goal"]
    return [*things, Part("target", {i: _site_colour(model.site_rgba[i]) for i in goals}, site=True)] if goals else things


def _colour(name: str, material: str, task: str) -> str:
    """The colour word of a geom before any repainting; "" where people would not agree."""
    if name in _ALWAYS.values():
        return {"robot arm": "red", "table": "brown"}.get(name, "")
    return _TEXTURED.get(name, _COLOURS.get(material, "")) if material else _PLAIN.get(task, "")


def _site_colour(rgba: np.ndarray) -> str:
    return ("red", "green", "blue")[int(np.argmax(rgba[:3]))]


def _play(env: "gymnasium.Env", task: str, stage: Stage, seed: int) -> list[Pose] | None:
    """The moments of one episode of the expert, up to a little after success; None where it failed."""
    seen, _ = env.reset(seed=seed)
    policy = ENV_POLICY_MAP[f"{task}-v3"]()
    poses, after = [stage.pose()], 0
    for _ in range(STEPS):
        seen, _, _, _, info = env.step(np.clip(policy.get_action(seen), -1, 1).astype(np.float32))
        poses.append(stage.pose())
        after += bool(info["success"]) or after > 0
        if after > 4:
            return poses
    return None


def _camera(stage: Stage, rng: np.random.Generator) -> Camera:
    if rng.random() < 0.25:
        name, turn = _VIEWS[int(rng.integers(len(_VIEWS)))]
        return Camera(name, turn)
    main = next(iter(stage.parts[0].colours))
    at = 0.6 * stage.data.geom_xpos[main] + 0.4 * stage.data.body("hand").xpos + rng.normal(0, 0.04, 3)
    azimuth = rng.choice([rng.uniform(15, 70), rng.uniform(110, 165), rng.uniform(170, 370)], p=[0.35, 0.35, 0.3])
    return Camera("", 0, (float(at[0]), float(at[1]), float(at[2])), rng.uniform(0.6, 1.3), float(azimuth), rng.uniform(-60, -18))


def episodes(task: str, plan: Plan) -> Iterator[Episode]:
    """Pictures and a clip of each episode that `plan` asks for of one task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium remarks on Meta-World's own spaces
        env = gymnasium.make("Meta-World/MT1", env_name=f"{task}-v3", seed=plan.seed)
        env.reset(seed=plan.seed)
        model, data = env.unwrapped.model, env.unwrapped.data
        rng = np.random.default_rng([plan.seed, *task.encode()])
        stage = Stage(model, data, parts(model, task), plan.size, rng)
        for index in range(len(plan.pictures)):
            yield _episode(env, task, stage, plan, index)
        stage.close()
        env.close()


def _episode(env: "gymnasium.Env", task: str, stage: Stage, plan: Plan, index: int) -> Episode:
    main_thing = stage.parts[0].name
    wanted = {main_thing, "target"} if main_thing == "puck" else {main_thing}
    for attempt in range(ATTEMPTS):
        poses = _play(env, task, stage, plan.seed + index + 1000 * attempt)
        if poses is None:
            continue
        stage.redress(0.15, sites=main_thing == "puck" or stage.rng.random() < 0.5)
        episode = Episode("metaworld", f"{task}-v3", ACTIONS[task])
        made = shoot(episode, stage, plan, index, poses, lambda: _camera(stage, stage.rng), wanted)
        if made is not None:
            return made
    raise RuntimeError(f"{task}: {ATTEMPTS} episodes of the expert gave no view of a success; is metaworld 3.1.1 installed?")


if __name__ == "__main__":
    main(list(ACTIONS), episodes)
