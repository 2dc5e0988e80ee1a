"""What a decoder lends a memory that has a policy: its attention, its masks, and where its tokens stand."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.attention.mask import Masks
from mmsdk.attention.types import Attention
from mmsdk.decoder.rope import Rotation
from mmsdk.kv.turning import Turning
from mmsdk.kv.types import LayerView

__all__ = ["Asking"]


@dataclass(frozen=True, slots=True)
class Asking:
    """Implements `mmsdk.kv.policy.Ask` for the new tokens of one layer. The rotation is one that tells where they stand."""

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

    def attend(self, query: Float[Tensor, "n h s d"], view: LayerView) -> Float[Tensor, "n h s d"]:
        """See `mmsdk.kv.policy.Ask`."""
        times = len(view.positions) // len(self.positions)
        masks = self.masks if times == 1 else self.masks.repeated(times)
        return self.core(query, view, masks.of(view))

    def unturned(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """In float32."""
        return self.rotation.undone(query)

    def row(self, place: int) -> "Asking":
        """Those of one row, which looks at what is its own."""
        return Asking(self.core, self.masks.row(place), self.rotation.row(place))
