"""One generation with sparse attention: a method, the order of rows, and what both keep from step to step, for each layer and branch."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.types import Everything, Place, Selection, Selector
from mmsdk.diffusion.attention.wave_align import Alignment, WaveAlign
from mmsdk.errors import InputError

__all__ = ["Session"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the last step of a layer and branch left: whose it was by its shapes, the method's memory, and the order of rows."""

    shape: tuple[int, ...]
    step: int
    memory: tuple[Tensor, ...]
    alignment: Alignment | None


class Session:
    """Attends for one request, layer by layer and step by step. State never passes between layers, branches of the guidance or requests.

    A step that is not later than the last one, or other shapes, begin anew; so does `reset`. Rows are put in order on a GPU alone: nothing
    else has a cache that it pays for.
    """

    def __init__(self, selector: Selector, align: WaveAlign | None = None) -> None:
        self._selector = selector
        self._align = WaveAlign() if align is None else align
        self._kept: dict[tuple[str, int], _Kept] = {}

    def reset(self) -> None:
        """Forget all: what comes is another generation."""
        self._kept.clear()

    def __call__(
        self,
        query: Float[Tensor, "b h s d"],
        keys: Float[Tensor, "b g s d"],
        values: Float[Tensor, "b g s d"],
        place: Place,
        branch: str = "",
        mask: Bool[Tensor, "*m s"] | None = None,
    ) -> Float[Tensor, "b h s d"]:
        """One attention; `branch` tells the passes of classifier-free guidance apart ("cond", "uncond").

        A `mask` of padding that is true everywhere is none. Raises InputError for one that is not, and where the grid is another than the
        tokens.
        """
        if place.grid.tokens != query.shape[2]:
            raise InputError(f"{place.grid} has {place.grid.tokens} tokens; there are {query.shape[2]}", item="grid")
        if mask is not None and not bool(mask.all()):
            raise InputError("sparse attention takes no padding; leave the padded tokens out, or use dense attention", item="mask")
        key = (branch, place.layer)
        shape = (*query.shape, *keys.shape)
        last = self._kept.get(key)
        if last is not None and (last.shape != shape or place.step <= last.step):
            last = None
        choice = self._selector(query, keys, values, replace(place, memory=() if last is None else last.memory))
        alignment = self._aligned(query, choice, None if last is None else last.alignment)
        memory = () if isinstance(choice, Everything) else choice.memory
        self._kept[key] = _Kept(shape, place.step, memory, alignment)
        return attend(query, keys, values, choice, None if alignment is None else alignment.row_order)

    def _aligned(self, query: Tensor, choice: Everything | Selection, before: Alignment | None) -> Alignment | None:
        if isinstance(choice, Everything) or query.device.type == "cpu":
            return None
        return self._align(choice.mask, 2 * choice.keys.length * query.shape[3] * query.element_size(), before)
