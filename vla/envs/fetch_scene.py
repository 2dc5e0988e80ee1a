"""A Fetch arm over a belt in MuJoCo: the scene, made of gymnasium-robotics' own model, and a camera that looks at it.

The model is that of FetchPickAndPlace. Added are a belt as long as things come from, a second thing, and a lamp; the first thing is red and
the second blue. Parts of the robot that the camera cannot see are not drawn, and nothing but fingers, things and belt collides.

Only one renderer of a process draws under OSMesa, and MuJoCo decides at its import what it draws with: see
`mmsdk.apps.train_mini.needs.screenless`. OSMesa brings an LLVM, after which Triton's cannot be loaded: import decoders first.
Lengths in metres, y along the belt, x across, z up.
"""

import importlib.util
from pathlib import Path

import mujoco
import numpy as np
from jaxtyping import Float, UInt8

from mmsdk.errors import InputError
from mmsdk.vla.envs.fetch_sizes import CENTRE, HEIGHT, REST, WIDTH

__all__ = ["FINGERS", "OPEN", "SUBSTEPS", "THINGS", "TIMESTEP", "View", "scene", "settled"]

OPEN = 0.05
"""How far each finger is from the middle when open."""
TIMESTEP, SUBSTEPS = 0.002, 20
"""Seconds of one step of physics, and how many make one step of control."""
FINGERS = ("robot0:r_gripper_finger_joint", "robot0:l_gripper_finger_joint")
THINGS = ("object0", "object1")

_PAINTS = ((0.85, 0.06, 0.06, 1.0), (0.08, 0.15, 0.9, 1.0))
_DARK = (0.15, 0.15, 0.15, 1.0)
_LAMP_AT = (1.12, 0.33, 0.48)
_BELT = (0.25, 1.6, 0.2)
_BASE = {"robot0:slide0": 0.405, "robot0:slide1": 0.48, "robot0:slide2": 0.0}
_SEEN = (
    "robot0:gripper_link",
    "robot0:wrist_roll_link",
    "robot0:wrist_flex_link",
    "robot0:r_gripper_finger_link",
    "robot0:l_gripper_finger_link",
)
_AWAY = 1.2
_DOWN = (0.5**0.5, 0.0, 0.5**0.5, 0.0)


def scene() -> "mujoco.MjModel":
    """The compiled model. Raises InputError, naming the fix, where gymnasium-robotics is not installed."""
    found = importlib.util.find_spec("gymnasium_robotics")
    if found is None or found.origin is None:
        raise InputError('gymnasium-robotics is not installed: pip install ".[robots]" in the clone', item="fetch belt")
    spec = mujoco.MjSpec.from_file(str(Path(found.origin).parent / "envs/assets/fetch/pick_and_place.xml"))
    spec.option.timestep = TIMESTEP
    for geom in spec.geoms:
        seen = geom.parent.name in _SEEN or not geom.parent.name.startswith("robot0:")
        geom.group = 0 if seen else 4
        if geom.parent.name.startswith("robot0:") and "finger" not in geom.parent.name:
            geom.contype = geom.conaffinity = 0
    belt = next(geom for geom in spec.geoms if geom.parent.name == "table0")
    # what carries things is the belt's motion, which `FetchBelt` adds; the surface itself only bears them
    belt.size, belt.condim, belt.priority, belt.material, belt.rgba = list(_BELT), 1, 1, "", [0.75, 0.75, 0.72, 1.0]
    other = spec.worldbody.add_body(name=THINGS[1], pos=[0.0, 2.5, 0.025])
    other.add_freejoint(name=f"{THINGS[1]}:joint")
    other.add_geom(name=THINGS[1], type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.025, 0.025, 0.025], condim=3, mass=2)
    for name, paint in zip(THINGS, _PAINTS, strict=True):
        thing = spec.geom(name)
        thing.material, thing.rgba = "", list(paint)
    lamp = spec.worldbody.add_geom(name="lamp", type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.035] * 3, pos=list(_LAMP_AT), rgba=list(_DARK))
    lamp.contype = lamp.conaffinity = 0
    return spec.compile()


def settled(model: "mujoco.MjModel") -> "mujoco.MjData":
    """The arm at rest above the middle of the belt with its fingers open, and no thing near."""
    data = mujoco.MjData(model)
    for name, place in _BASE.items():
        data.joint(name).qpos[:] = place
    for name, side in zip(THINGS, (-2.5, 2.5), strict=True):
        data.joint(f"{name}:joint").qpos[:] = (-1.0, side, 0.025, 1.0, 0.0, 0.0, 0.0)
    welds = model.eq_type == int(mujoco.mjtEq.mjEQ_WELD)
    model.eq_data[welds, :7] = (0, 0, 0, 0, 0, 0, 1)
    mujoco.mj_forward(model, data)
    tip = data.site("robot0:grip").xpos - data.body("robot0:gripper_link").xpos
    data.mocap_pos[0] = data.body("robot0:gripper_link").xpos
    begin, end = data.mocap_pos[0].copy(), np.array([*CENTRE, REST])
    data.ctrl[:] = OPEN
    for step in range(1500):
        # the hand ends up pointing downwards, with its tip below the wrist
        data.mocap_pos[0] = begin + (end - begin) * min(1.0, step / 700)
        data.mocap_quat[0] = _DOWN
        mujoco.mj_step(model, data)
    data.mocap_pos[0] += end - data.site("robot0:grip").xpos
    for _ in range(500):
        mujoco.mj_step(model, data)
    assert np.isfinite(data.qpos).all() and np.isfinite(tip).all(), "the arm comes to rest"
    data.time = 0.0
    return data


class View:
    """A camera in front of the belt. Close it before another one is opened in the same process."""

    def __init__(self, model: "mujoco.MjModel") -> None:
        # all before the GL context exists: without shadows and smoothing it is 5 to 12 times faster
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.vis.global_.fovy = 17.0
        self._model, self._scratch = model, mujoco.MjData(model)
        self._renderer = mujoco.Renderer(model, HEIGHT, WIDTH)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = 0
        self._camera, self._options = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.lookat[:], self._camera.distance = (*CENTRE, 0.46), _AWAY
        self._camera.azimuth, self._camera.elevation = 180.0, -38.0
        self._options.sitegroup[:] = 0
        self._lamp = model.geom("lamp").id

    def picture(self, pose: Float[np.ndarray, " q"], lamp: int) -> UInt8[np.ndarray, "h w 3"]:
        """The scene in this pose; the lamp shows the colour of thing 0 or 1, or is out (-1)."""
        self._scratch.qpos[:] = pose
        self._model.geom_rgba[self._lamp] = _DARK if lamp < 0 else _PAINTS[lamp]
        mujoco.mj_kinematics(self._model, self._scratch)
        mujoco.mj_camlight(self._model, self._scratch)
        self._renderer.update_scene(self._scratch, self._camera, self._options)
        seen: UInt8[np.ndarray, "h w 3"] = self._renderer.render()
        return seen

    def close(self) -> None:
        """Give the GL context back."""
        self._renderer.close()
