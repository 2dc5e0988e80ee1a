"""What a decoder lends a memory that has a policy: its attention, its masks, and where its tokens stand."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.attention.mask import Masks
from mmsdk.attention.types import Attention
from mmsdk.decoder.rope import Rotation
from mmsdk.kv.turning import Turning
from mmsdk.kv.types import LayerView

__all__ = ["Asking", "Bound"]


@runtime_checkable
class Bound(Protocol):
    """An attention that has the tokens it looks for in it, in a form of its own: one to latents."""

    def row(self, place: int) -> Attention:
        """That of one row."""
        ...


@dataclass(frozen=True, slots=True)
class Asking:
    """Implements `mmsdk.kv.policy.Ask` for the new tokens of one layer. The rotation is one that tells where they stand.

    Of entries that are wider than what turns, latents and their rotated keys, the last channels turn.
    """

    core: Attention
    masks: Masks
    rotation: Rotation

    @property
    def positions(self) -> Int[Tensor, "b s"]:
        """Counted in tokens, -1 for padding."""
        return self.masks.positions

    @property
    def places(self) -> Int[Tensor, "b s"]:
        """Where heads were turned to, along the first axis."""
        return self.rotation.standing[0].places

    @property
    def window(self) -> int:
        """Of a layer with a window of its own the positions that it sees, else 0."""
        return self.masks.window

    @property
    def turning(self) -> Turning:
        """How this layer turns."""
        return self.rotation.standing[0].turning

    def attend(self, query: Float[Tensor, "n h s d"], view: LayerView) -> Float[Tensor, "n h s e"]:
        """See `mmsdk.kv.policy.Ask`."""
        times = len(view.positions) // len(self.positions)
        masks = self.masks if times == 1 else self.masks.repeated(times)
        return self.core(query, view, masks.of(view))

    def unturned(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """In float32."""
        turned = 2 * self.rotation.cos.shape[-1]
        still, moved = query.split((query.shape[3] - turned, turned), dim=-1)
        return torch.cat((still.float(), self.rotation.undone(moved)), dim=-1)

    def row(self, place: int) -> "Asking":
        """Those of one row, which looks at what is its own."""
        core = self.core.row(place) if isinstance(self.core, Bound) else self.core
        return Asking(core, self.masks.row(place), self.rotation.row(place))
