"""Between two VLM updates: the newest block edited by what the cameras see now, through a gate that begins almost shut.

Published (D2-VLA, arXiv 2609.34792), sizes of the paper as defaults:
- Sight: fresh visual tokens projected to 1024, an embedding of their camera added; one temporal token MLP(delta) + e with
  delta = (t - t_slow) / V; two layers of 8 heads; a pooler of 32 queries gives Z. No text. Training stops gradients at the visual tokens.
- An editor for each layer: R = softmax(Q~ K~^T / sqrt(d) + Lambda) V~ from Z to the anchor block (Lambda hides its invalid slots),
  D = softmax(K~ R^T / sqrt(d)) R back to its slots, (dK, dV) = Head(D), a norm and two matrices with GELU between.
- K_ref = K_c + tanh(g_K) dK, V_ref = V_c + tanh(g_V) dV, before RoPE, all slots kept, nothing added where a slot is invalid. The gates
  are scalars, begun at arctanh(.1), the head's last matrix at zero: at first the anchor is returned as it is.
- What is edited is always the slow anchor, never an earlier edit.

Reconstruction: norms before attention and feed-forward, the pooler as one attention of learnt queries with a norm, linear maps for Q~, K~
(of the anchor's keys) and V~ (of its values) over all key-value heads side by side, the width of the temporal MLP.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.attention.mask import Bias
from mmsdk.decoder.config import DecoderConfig
from mmsdk.errors import ModelError
from mmsdk.kv.parts import Block
from mmsdk.kv.selection import BlockLayout

__all__ = ["Editor", "Refiner", "RefinerConfig"]

_GATE = math.atanh(0.1)


@dataclass(frozen=True, slots=True)
class RefinerConfig:
    """Sizes. `sight` is the width of a visual token, which need not be the decoder's. Raises ModelError where heads do not share evenly."""

    sight: int = 2048
    width: int = 1024
    layers: int = 2
    heads: int = 8
    inner: int = 4096
    queries: int = 32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ModelError(f"refiner config: {self.heads} heads do not share a width of {self.width} evenly")


class MultiHead(nn.Module):
    """Attention of several heads from tokens to tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b q w"], at: Float[Tensor, "b n w"], mask: Bias) -> Float[Tensor, "b q w"]:
        """From x to `at`."""
        query = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.kv(at).chunk(2, dim=-1))
        seen = F.scaled_dot_product_attention(query, key, value, mask.bias)
        out: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return out


class SightLayer(nn.Module):
    """Attention both ways and feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        self.norm1, self.look = nn.LayerNorm(config.width), MultiHead(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(nn.Linear(config.width, config.inner), nn.GELU(), nn.Linear(config.inner, config.width))

    def forward(self, x: Float[Tensor, "b n w"], mask: Bias) -> Float[Tensor, "b n w"]:
        """One layer."""
        read = self.norm1(x)
        x = x + self.look(read, read, mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Sight(nn.Module):
    """Fresh visual tokens and the time since the anchor to Z, one vector a query."""

    def __init__(self, config: RefinerConfig, cameras: int) -> None:
        super().__init__()
        width = config.width
        self.project = nn.Linear(config.sight, width)
        self.camera = nn.Embedding(cameras, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, width))
        self.token = nn.Parameter(torch.randn(width) * 0.02)
        self.layers = nn.ModuleList(SightLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(config.queries, width) * 0.02)
        self.pool = MultiHead(width, config.heads)

    def forward(
        self, features: Float[Tensor, "b n e"], shown: Bool[Tensor, "b n"], delta: Float[Tensor, " b"], sizes: tuple[int, ...]
    ) -> Float[Tensor, "b q w"]:
        """Z of the features of cameras that have so many tokens each."""
        dtype = self.token.dtype
        counts = torch.tensor(sizes, device=features.device)
        cameras = self.camera.weight.repeat_interleave(counts, dim=0, output_size=sum(sizes))
        now = self.time(delta[:, None].to(dtype)) + self.token
        # published: the encoder of the cameras learns from the slow path alone
        x = torch.cat((self.project(features.detach().to(dtype)) + cameras, now[:, None]), dim=1)
        mask = Bias.of(F.pad(shown, (0, 1), value=True)[:, None, None], dtype)
        for layer in self.layers:
            x = layer(x, mask)
        queries = self.queries.expand(len(x), -1, -1)
        pooled: Tensor = queries + self.pool(queries, self.norm(x), mask)
        return pooled


class Editor(nn.Module):
    """The change of one layer's keys and values, g heads of d, made from Z and these keys and values themselves."""

    def __init__(self, config: RefinerConfig, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        width, size = config.width, kv_heads * head_dim
        self.kv_heads = kv_heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(size, width), nn.Linear(size, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, config.inner), nn.Linear(config.inner, 2 * size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.key_gate, self.value_gate = nn.Parameter(torch.tensor(_GATE)), nn.Parameter(torch.tensor(_GATE))

    def forward(
        self, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], z: Float[Tensor, "b q w"], valid: Bool[Tensor, "b s"]
    ) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s d"]]:
        """The edited keys and values, in the dtype they came in."""
        side_by_side = [kept.transpose(1, 2).flatten(2).to(z.dtype) for kept in (keys, values)]
        key, value = self.k(side_by_side[0]), self.v(side_by_side[1])
        hidden = Bias.of(valid[:, None, None], z.dtype).bias[:, 0]
        read = F.scaled_dot_product_attention(self.q(z), key, value, hidden)
        spread = F.scaled_dot_product_attention(key, read, read)
        change = self.down(F.gelu(self.up(self.norm(spread)))).masked_fill(~valid[:, :, None], 0)
        dk, dv = (part.unflatten(2, (self.kv_heads, -1)).transpose(1, 2).to(keys.dtype) for part in change.chunk(2, dim=-1))
        return keys + self.key_gate.tanh().to(keys.dtype) * dk, values + self.value_gate.tanh().to(values.dtype) * dv


class Refiner(nn.Module):
    """Sight and one editor for every layer of a decoder."""

    def __init__(self, decoder: DecoderConfig, layout: BlockLayout, config: RefinerConfig = RefinerConfig()) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.sight = Sight(config, len(layout.cameras))
        self.editors = nn.ModuleList(Editor(config, decoder.kv_heads, decoder.head_dim) for _ in range(decoder.layers))

    def forward(
        self,
        anchor: Block,
        features: Float[Tensor, "b n e"],
        present: Bool[Tensor, "b c"],
        delta: Float[Tensor, " b"],
        time: float = 0.0,
    ) -> Block:
        """The anchor block as it would be with what the cameras see now; as many slots, as valid as before.

        `delta` is the share of the time between two VLM updates that has passed since the anchor.
        """
        z = self.sight(features, self.layout.shown(present), delta, self.layout.cameras)
        edited = [editor(anchor.keys[layer], anchor.values[layer], z, anchor.valid) for layer, editor in enumerate(self.editors)]
        keys, values = zip(*edited, strict=True)
        return Block(torch.stack(keys), torch.stack(values), anchor.valid, time)
