"""The shape of a llama-family decoder."""

import math
from dataclasses import dataclass, field

from mmsdk.decoder.mlp import Activation
from mmsdk.decoder.rope import Scaling, Sections, Unscaled
from mmsdk.errors import ModelError

__all__ = ["DecoderConfig"]

# No real model comes near; a checkpoint that claims more is broken, and believing it would exhaust memory.
_MOST = 1 << 24
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches. `inner` is the width inside the feed-forward half, `context` the longest sequence the model was made for.

    Llama has no switch on, Qwen2 has `qkv_bias`, Qwen3 has `qk_norm`: an RMSNorm over each head of queries and keys, before the rotation.
    Qwen's vision-language models turn heads along three axes, by `rope_sections`.
    Gemma has the `activation` "gelu_tanh" and multiplies the embeddings of words by `embedding_scale`, the root of its width.
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
        sections = self.rope_sections.counts
        if sections and (len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != self.head_dim):
            raise ModelError(f"decoder config: rope_sections {sections} must be three that share the {self.head_dim // 2} pairs of a head")
        for name, lowest in (("norm_eps", 0.0), ("rope_theta", 1.0), ("embedding_scale", 0.0)):
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value) or value <= lowest:
                raise ModelError(f"decoder config: {name} is {value!r}, it must be a finite float above {lowest}")
