"""What a model of video is asked, and what comes in from outside while it answers: its attention, and how its layers are run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid

__all__ = ["Attend", "Condition", "Dense", "Layer", "Spot", "Straight", "Through", "Transformer"]

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Condition:
    """The text that a clip is made for, embedded; `mask` is true where there is text and not padding, none where all of it is text.

    Some models ask for more: `pooled` is the text as one vector, `guidance` how far one goes towards it that has that distilled into it;
    `beside` are latents that stand beside the noisy ones as further channels (the first frame, and where it is), `seen` is what a picture's
    encoder saw of it. `places` are where in a larger world the windows of the frames begin, rows first, in tokens, for a model whose rotary
    positions are `Roaming`.
    """

    text: Float[Tensor, "b t e"]
    mask: Bool[Tensor, "b t"] | None = None
    pooled: Float[Tensor, "b p"] | None = None
    guidance: float = 6.0
    beside: Float[Tensor, "b c f h w"] | None = None
    seen: Float[Tensor, "b m i"] | None = None
    places: Float[Tensor, "b f 2"] | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an attention stands: in the grid, in the layers, and the projection that its heads' outputs go through."""

    grid: Grid
    layer: int
    layers: int
    projection: Float[Tensor, "h e d"]


@runtime_checkable
class Attend(Protocol):
    """Self-attention of one layer over all tokens of a clip."""

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]: ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Every token reads every token."""

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]:
        """See `Attend`."""
        return F.scaled_dot_product_attention(query, keys, values)


@runtime_checkable
class Through(Protocol):
    """Runs tokens through the layers, or spares itself some; `modulated` makes what the first layer's attention reads."""

    def __call__(self, x: Float[Tensor, "b n d"], layers: Sequence[Layer], modulated: Layer) -> Float[Tensor, "b n d"]: ...


@dataclass(frozen=True, slots=True)
class Straight:
    """One layer after the other."""

    def __call__(self, x: Float[Tensor, "b n d"], layers: Sequence[Layer], modulated: Layer) -> Float[Tensor, "b n d"]:
        """See `Through`."""
        for layer in layers:
            x = layer(x)
        return x


@runtime_checkable
class Transformer(Protocol):
    """A model that is asked step by step; `DiT`, and `mmsdk.diffusion.joint.JointDiT`."""

    @property
    def like(self) -> Tensor:
        """Of its dtype, where it is."""
        ...

    def grid(self, latents: Float[Tensor, "b c f h w"]) -> Grid:
        """The tokens that latents are cut into. Raises InputError where their sides are no multiples of a patch."""
        ...

    def __call__(
        self,
        latents: Float[Tensor, "b c f h w"],
        time: Float[Tensor, " b"] | Float[Tensor, "b n"],
        condition: Condition,
        attend: Attend = ...,
        through: Through = ...,
        first: int = ...,
    ) -> Float[Tensor, "b e f h w"]: ...
