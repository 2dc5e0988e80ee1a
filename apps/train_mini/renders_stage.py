"""One MuJoCo scene under one off-screen renderer: pictures, and what is really to be seen in them.

Labels come from MuJoCo's own segmentation rendering, never from the model's geometry: a thing hidden by the arm is not in the list.
Only one renderer may live in a process: under OSMesa a second one silently returns garbage.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import mujoco
import numpy as np

__all__ = ["Camera", "Part", "Pose", "Seen", "Stage"]

Pose: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
Seen: TypeAlias = dict[str, str | float]
MIN_PIXELS = 60  # at 224 x 224; below that even a person guesses
PALETTE = {
    "red": (0.75, 0.05, 0.05), "green": (0.1, 0.6, 0.15), "blue": (0.1, 0.2, 0.8), "yellow": (0.9, 0.8, 0.1),
    "orange": (0.95, 0.45, 0.05), "purple": (0.5, 0.15, 0.65), "pink": (0.95, 0.5, 0.7),
    "white": (0.92, 0.92, 0.92), "black": (0.06, 0.06, 0.06), "grey": (0.45, 0.45, 0.45),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A set of geoms and sites that a person would call by one name; `colours` gives the colour word of each geom."""

    name: str
    colours: dict[int, str]
    site: bool = False


@dataclass(frozen=True, slots=True)
class Camera:
    """A view: a named camera of the model (turned by `turn` quarter turns) or, with name "", a free one around `at`."""

    name: str = ""
    turn: int = 0
    at: tuple[float, float, float] = (0.0, 0.0, 0.0)
    distance: float = 1.0
    azimuth: float = 90.0
    elevation: float = -30.0

    def handle(self) -> "str | mujoco.MjvCamera":
        """What MuJoCo's renderer takes."""
        if self.name:
            return self.name
        free = mujoco.MjvCamera()
        free.lookat[:], free.distance, free.azimuth, free.elevation = self.at, self.distance, self.azimuth, self.elevation
        return free


@dataclass(slots=True)
class Stage:
    """Pictures of `data` under changing light and paint. Close it before another stage is opened."""

    model: "mujoco.MjModel"
    data: "mujoco.MjData"
    parts: Sequence[Part]
    size: int
    rng: np.random.Generator
    painted: dict[str, str] = field(init=False, default_factory=dict)
    _renderer: "mujoco.Renderer" = field(init=False)
    _options: "mujoco.MjvOption" = field(init=False)
    _first: tuple[np.ndarray, ...] = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        model.vis.quality.shadowsize = 0  # both before the GL context exists: 5 to 12 times faster
        model.vis.quality.offsamples = 0
        self._renderer = mujoco.Renderer(model, self.size, self.size)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = 0
        self._options = mujoco.MjvOption()
        self._first = tuple(a.copy() for a in (model.geom_matid, model.geom_rgba, model.light_diffuse, self._headlight()))

    def close(self) -> None:
        """Give the GL context back."""
        self._renderer.close()

    def redress(self, paint: float, sites: bool, often: Sequence[str] = ()) -> None:
        """New light, the goal markers shown or hidden, each part repainted in a palette colour with probability `paint` (`often`: 0.6)."""
        model, rng = self.model, self.rng
        model.geom_matid[:], model.geom_rgba[:], light, head = self._first
        warmth = 1 + rng.uniform(-0.07, 0.07) * np.array([1.0, 0.0, -1.0])
        model.light_diffuse[:] = light * rng.uniform(0.6, 1.15) * warmth
        self._headlight()[:] = head * rng.uniform(0.7, 1.2)
        self._options.sitegroup[:] = sites
        self.painted = {}
        for part in self.parts:
            if part.site or rng.random() >= (0.6 if part.name in often else paint):
                continue
            colour = str(rng.choice(list(PALETTE)))
            geoms = list(part.colours)
            model.geom_matid[geoms] = -1
            model.geom_rgba[geoms, :3] = _near(PALETTE[colour], rng)
            model.geom_rgba[geoms, 3] = 1.0
            self.painted[part.name] = colour

    def pose(self) -> Pose:
        """The moment, to come back to with `show`."""
        return self.data.qpos.copy(), self.data.mocap_pos.copy(), self.data.mocap_quat.copy()

    def show(self, pose: Pose) -> None:
        """Go back to a moment of the episode."""
        self.data.qpos[:], self.data.mocap_pos[:], self.data.mocap_quat[:] = pose
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def picture(self, camera: Camera) -> np.ndarray:
        """uint8 RGB (size, size, 3) of the moment now shown."""
        self._renderer.update_scene(self.data, camera.handle(), self._options)
        return np.ascontiguousarray(np.rot90(self._renderer.render(), camera.turn))

    def seen(self, camera: Camera) -> list[Seen]:
        """Name, colour ("" where mixed), centre of the visible pixels and their share of the picture, for every part that can be seen."""
        self._renderer.enable_segmentation_rendering()
        self._renderer.update_scene(self.data, camera.handle(), self._options)
        ids, kinds = np.moveaxis(np.rot90(self._renderer.render(), camera.turn), -1, 0)
        self._renderer.disable_segmentation_rendering()
        found = (self._look(part, ids, kinds) for part in self.parts)
        return [one for one in found if one is not None]

    def _look(self, part: Part, ids: np.ndarray, kinds: np.ndarray) -> Seen | None:
        kind = mujoco.mjtObj.mjOBJ_SITE if part.site else mujoco.mjtObj.mjOBJ_GEOM
        mask = (kinds == int(kind)) & np.isin(ids, list(part.colours))
        pixels = int(mask.sum())
        if pixels < MIN_PIXELS * (self.size / 224) ** 2:
            return None
        rows, columns = np.nonzero(mask)
        x, y = ((v.mean() + 0.5) / self.size for v in (columns, rows))
        colour = self.painted.get(part.name) or _main_colour(part, ids[mask])
        return {
            "name": part.name.split("#")[0],
            "colour": colour,
            "x": round(float(x), 4),
            "y": round(float(y), 4),
            "area": round(pixels / mask.size, 5),
        }

    def _headlight(self) -> np.ndarray:
        lamp: np.ndarray = self.model.vis.headlight.diffuse
        return lamp


def _main_colour(part: Part, ids: np.ndarray) -> str:
    """The colour of at least 60 % of the visible pixels, else ""."""
    share: dict[str, int] = {}
    for geom, count in zip(*np.unique(ids, return_counts=True), strict=True):
        share[part.colours[int(geom)]] = share.get(part.colours[int(geom)], 0) + int(count)
    colour, most = max(share.items(), key=lambda pair: pair[1])
    return colour if most >= 0.6 * len(ids) else ""


def _near(rgb: tuple[float, float, float], rng: np.random.Generator) -> tuple[float, float, float]:
    """A shade of a colour that still has its name."""
    h, s, v = colorsys.rgb_to_hsv(*rgb)
    return colorsys.hsv_to_rgb(h + rng.uniform(-0.012, 0.012), s * rng.uniform(0.9, 1.0), v * rng.uniform(0.9, 1.05))
