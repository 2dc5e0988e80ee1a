"""The shape of a llama-family decoder."""

import math
from dataclasses import dataclass, field

from mmsdk.attention.mla import Latent
from mmsdk.decoder.mlp import Activation
from mmsdk.decoder.moe import Mixture
from mmsdk.decoder.rope import Dynamic, LongRope, Scaling, Sections, Unscaled
from mmsdk.decoder.sight import Local, Sees
from mmsdk.errors import ModelError
from mmsdk.kv.three_level import Plan

__all__ = ["DecoderConfig", "Grouped", "Plain"]

# No real model comes near; a checkpoint that claims more is broken, and believing it would exhaust memory.
_MOST = 1 << 24
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention, whose sizes are the config's own."""


@dataclass(frozen=True, slots=True)
class Plain:
    """One feed-forward half in every layer, `inner` wide."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches. `inner` is the width inside the feed-forward half, `context` the longest sequence the model was made for.

    Llama has no switch on, Qwen2 has `qkv_bias`, Qwen3 has `qk_norm`: an RMSNorm over each head of queries and keys, before the rotation.
    Qwen's vision-language models turn heads along three axes, by `rope_sections`.
    DeepSeek's have latent attention, with a single key-value head, and a mixture of experts in most layers, `inner` being for the others.
    DeepSeek-V4 attends to levels of memory, by their plan, and its own `DeepseekV4Config` says the rest; this is what others ask about it.
    Gemma has the `activation` "gelu_tanh", adds `norm_offset` to the weights of its norms and multiplies the embeddings of words by
    `embedding_scale`, the root of its width. Gemma 3 also has norms behind attention and feed-forward (`post_norms`), scales queries by
    `query_scale` and has `local` layers. `sees` is told in `mmsdk.decoder.sight`.
    Raises ModelError for sizes that do not fit together.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    context: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Scaling = field(default_factory=Unscaled)
    rope_sections: Sections = Sections()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    post_norms: bool = False
    query_scale: float = 1.0
    local: Local = Local()
    sees: Sees = "before"
    attention: Grouped | Latent | Plan = field(default_factory=Grouped)
    feed: Plain | Mixture = field(default_factory=Plain)

    @property
    def entry(self) -> tuple[int, int]:
        """Widths of the key and of the value that a token leaves in each key-value head of a layer's cache."""
        if isinstance(self.attention, Latent):
            return self.attention.width, self.attention.indexer.width
        return self.head_dim, 0 if isinstance(self.attention, Plan) else self.head_dim

    @property
    def levels(self) -> tuple[Plan, ...]:
        """The plan of a memory of levels; none where each layer remembers every token."""
        return (self.attention,) if isinstance(self.attention, Plan) else ()

    @property
    def rotated(self) -> int:
        """Channels of a head that turn with the position."""
        return self.attention.rope if isinstance(self.attention, Latent) else self.head_dim

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "inner", "context"):
            size, most = getattr(self, name), _MOST_LAYERS if name == "layers" else _MOST
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
                raise ModelError(f"decoder config: {name} is {size!r}, it must be a whole number from 1 to {most}")
        if self.heads * self.head_dim > _MOST:
            raise ModelError(f"decoder config: {self.heads} heads of {self.head_dim} are wider together than {_MOST}")
        if self.heads % self.kv_heads:
            raise ModelError(f"decoder config: {self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"decoder config: head_dim is {self.head_dim}; rotary positions need an even one")
        if isinstance(self.attention, Latent) and (self.kv_heads, self.head_dim) != (1, self.attention.head):
            raise ModelError(f"decoder config: latent attention has one key-value head, and heads of {self.attention.head} channels")
        self._check_scaling()
        sections = self.rope_sections.counts
        if sections and (len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != self.head_dim):
            raise ModelError(f"decoder config: rope_sections {sections} must be three that share the {self.head_dim // 2} pairs of a head")
        if self.local.window < 1 or not all(0 <= layer < self.layers for layer in self.local.layers):
            raise ModelError(f"decoder config: local is {self.local}; it must be of layers that there are, and a window of at least 1")
        for name, lowest in (("norm_eps", 0.0), ("rope_theta", 1.0), ("embedding_scale", 0.0), ("query_scale", 0.0)):
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value) or value <= lowest:
                raise ModelError(f"decoder config: {name} is {value!r}, it must be a finite float above {lowest}")

    def _check_scaling(self) -> None:
        pairs = self.rotated // 2
        if isinstance(self.rope_scaling, LongRope) and {len(self.rope_scaling.short), len(self.rope_scaling.long)} != {pairs}:
            raise ModelError(f"decoder config: short_factor and long_factor of the rope scaling must have {pairs} numbers each")
        if isinstance(self.rope_scaling, Dynamic) and pairs < 2:
            raise ModelError("decoder config: a dynamic rope scaling needs at least 4 channels that turn")
