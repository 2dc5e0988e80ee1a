"""What a generation attends with: all tokens to all tokens, or a method of sparse attention with what it keeps from step to step."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.adapter import selector
from mmsdk.diffusion.attention.session import Session
from mmsdk.diffusion.attention.types import Place, Selector
from mmsdk.diffusion.types import Attend, Dense, Spot

__all__ = ["Attending", "DenseAttending", "SparseAttending", "attending"]


@runtime_checkable
class Attending(Protocol):
    """Attention of one generation: what attends at a step, in a pass of the guidance."""

    def at(self, step: int, steps: int, branch: str) -> Attend: ...


@dataclass(frozen=True, slots=True)
class DenseAttending:
    """The same at every step."""

    def at(self, step: int, steps: int, branch: str) -> Attend:
        """See `Attending`."""
        return Dense()


@dataclass(frozen=True, slots=True)
class _Sparse:
    session: Session
    step: int
    steps: int
    branch: str

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]:
        place = Place(spot.grid, self.step, self.steps, spot.layer, spot.layers, projection=spot.projection)
        return self.session(query, keys, values, place, self.branch)


@dataclass(frozen=True, slots=True)
class SparseAttending:
    """A method of `mmsdk.diffusion.attention.methods`; passes and layers never share what it keeps."""

    selector: Selector
    _session: Session = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_session", Session(self.selector))

    def at(self, step: int, steps: int, branch: str) -> Attend:
        """See `Attending`."""
        return _Sparse(self._session, step, steps, branch)


def attending(method: str | Selector) -> Attending:
    """A new one, for one generation: "dense", a method with its knobs ("svg2:mass=0.95", "svg2:0.95"), or an object.

    Raises PluginError for an unknown method.
    """
    if method == "dense":
        return DenseAttending()
    return SparseAttending(selector(method))
