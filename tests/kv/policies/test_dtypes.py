"""Memories that read less or remember coarsely, in half-size numbers as models come in, over rows of unequal length."""

import pytest
import torch

from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.kv.memory import memory_of
from mmsdk.kv.policy_memory import PolicyMemory

CONFIG = DecoderConfig(vocabulary=50, width=32, layers=3, heads=4, kv_heads=2, head_dim=16, inner=40, context=512)


@torch.no_grad()
@pytest.mark.parametrize("name", ["quest", "santa", "tiered", "rdkv", "thinkv", "omnitide"])
def test_half_size_numbers_stay_and_memory_is_that_of_half_size_numbers(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {key: tensor.shape for key, tensor in Decoder(CONFIG).state_dict().items()}
    weights = {key: torch.randn(shape, generator=generator) * 0.2 for key, shape in shapes.items()}
    x, at = torch.randn(2, 204, 32, generator=generator), torch.arange(200).repeat(2, 1)
    at[1] = (at[1] - 60).clamp_min(-1)
    held = []
    for kind in (torch.float32, torch.bfloat16):
        decoder = Decoder.of(CONFIG, {key: weight.to(kind) for key, weight in weights.items()})
        memory = memory_of(f"{name}:96")
        assert isinstance(memory, PolicyMemory)
        cache = memory.cache(CONFIG.layers, 2, "cpu")
        decoder(x[:, :200].to(kind), at, cache)
        cache.settle()
        for step in range(200, 204):
            out = decoder(x[:, step : step + 1].to(kind), cache.position[:, None], cache)
            assert out.dtype == kind and out.isfinite().all()
        assert all(cache.view(layer).keys.dtype == kind for layer in range(CONFIG.layers))
        held.append(cache.nbytes)
    assert held[1] < 0.85 * held[0]
