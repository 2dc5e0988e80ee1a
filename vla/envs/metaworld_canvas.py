"""Pictures of a MuJoCo simulation in several sizes from one renderer: under OSMesa only one of a process draws.

`mujoco.Renderer` has one size for good. This draws into a corner of what it would have drawn into, pixel for pixel the same.
"""

import mujoco
import numpy as np
from jaxtyping import Float, UInt8
from mujoco.gl_context import GLContext

__all__ = ["Canvas", "camera"]

_GEOMS = 10_000


class Canvas:
    """Draws pictures of at most `largest` pixels a side, without shadows and reflections: those take most of the time."""

    def __init__(self, model: "mujoco.MjModel", largest: int) -> None:
        self._model, self._largest = model, largest
        # before the GL context exists: 5 to 12 times faster
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = largest
        self._scene, self._option = mujoco.MjvScene(model=model, maxgeom=_GEOMS), mujoco.MjvOption()
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        self._gl = GLContext(largest, largest)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)

    def __call__(self, data: "mujoco.MjData", view: "mujoco.MjvCamera", side: int) -> UInt8[np.ndarray, "h w 3"]:
        """What `view` sees, `side` pixels square."""
        assert side <= self._largest, f"{side} pixels do not fit into {self._largest}"
        drawn, corner = np.empty((side, side, 3), np.uint8), mujoco.MjrRect(0, 0, side, side)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, data, self._option, None, view, everything, self._scene)
        self._gl.make_current()
        mujoco.mjr_render(corner, self._scene, self._context)
        mujoco.mjr_readPixels(drawn, None, corner, self._context)
        upright: UInt8[np.ndarray, "h w 3"] = np.flipud(drawn)
        return upright

    def close(self) -> None:
        """Give the GL context back."""
        self._context.free()
        self._gl.free()


def camera(
    at: tuple[float, float, float], distance: float, azimuth: float, elevation: float, origin: Float[np.ndarray, "3"] | None = None
) -> "mujoco.MjvCamera":
    """One that looks at a place, in metres of the room or from `origin`, from so many metres away; azimuth and elevation in degrees."""
    view = mujoco.MjvCamera()
    view.lookat[:] = np.array(at) if origin is None else np.array(at) + origin
    view.distance, view.azimuth, view.elevation = distance, azimuth, elevation
    return view
