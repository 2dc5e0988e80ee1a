"""Policies on latents: what stays is what the model's own weights say, and what is left answers as a plain cache of the same entries."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dsa import Lightning
from mmsdk.attention.mla import Latent
from mmsdk.decoder.compaction import closed_up
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.latent import LatentAttention
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.policy_memory import policy_of
from mmsdk.kv.types import KVCache

PROMPT, KEPT = 24, 7
SIZES = {"kv_rank": 16, "nope": 8, "rope": 4, "value": 6}
PLAIN, INDEXED = Latent(q_rank=0, **SIZES), Latent(q_rank=20, **SIZES, indexer=Lightning(heads=2, width=8, topk=5))
NAMES = ["window", "random", "tova", "h2o", "snapkv"]


def decoder(sizes: Latent, layers: int = 2) -> Decoder:
    config = DecoderConfig(
        vocabulary=60, width=32, layers=layers, heads=4, kv_heads=1, head_dim=sizes.head, inner=40, context=64, attention=sizes
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()})


def drawn(length: int) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


def plain(model: Decoder) -> DenseCache:
    return DenseCache.allocate(model.config.layers, 2, 1, model.config.entry, 64, torch.float32, "cpu")


@torch.no_grad()
def read(model: Decoder, cache: KVCache, x: Tensor, start: int = 0) -> Tensor:
    out: Tensor = model(x, torch.arange(start, start + x.shape[1]).expand(2, -1), cache)
    return out[:, -1]


def held(name: str, model: Decoder, amount: int, x: Tensor) -> PolicyCache:
    extra = ",window=3,kernel=3" if name == "snapkv" else ",interval=0" if name in ("tova", "h2o", "random") else ""
    cache = policy_of(f"{name}:{amount}{extra}").cache(model.config.layers, 2, "cpu")
    read(model, cache, x)
    cache.settle()
    return cache


@pytest.mark.parametrize("sizes", [PLAIN, INDEXED], ids=["plain", "indexed"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_answers_as_a_plain_cache_of_the_same_entries(name: str, sizes: Latent) -> None:
    """Memory is freed, down to the entries; a budget for all of them changes nothing."""
    model, x = decoder(sizes), drawn(PROMPT + 1)
    exact, cache, whole = plain(model), held(name, model, KEPT, x[:, :PROMPT]), held(name, model, 40, x[:, :PROMPT])
    read(model, exact, x[:, :PROMPT])
    assert whole.span == 2 * 2 * PROMPT and cache.span < whole.span / 2 and cache.nbytes < whole.nbytes / 2
    torch.testing.assert_close(read(model, whole, x[:, PROMPT:], PROMPT), read(model, exact.fork(), x[:, PROMPT:], PROMPT))
    for layer in range(2):
        assert cache.lengths(layer).unique().tolist() == [KEPT]
        # a window lets go before the next token looks
        stay = cache.view(layer).positions[:, 1 if name == "window" else 0 :]
        exact.keep(layer, stay)
    torch.testing.assert_close(read(model, cache, x[:, PROMPT:], PROMPT), read(model, exact, x[:, PROMPT:], PROMPT), rtol=1e-4, atol=1e-5)
    assert cache.read_bytes == 2 * 2 * (KEPT + (name != "window")) * sum(model.config.entry) * 4


def test_attention_is_that_of_the_model() -> None:
    """TOVA keeps what the last query weighs most, H2O what all of them do: by the weights that the layer tells of itself."""
    model, x = decoder(PLAIN, layers=1), drawn(PROMPT)
    attention, layer = model.layers[0].attention, model.layers[0]
    assert isinstance(attention, LatentAttention)
    with torch.no_grad():
        query, key, _ = attention.project(layer.norm1(x), model.rotation(torch.arange(PROMPT)[None], torch.float32))
        scores = (query @ key.transpose(2, 3) / key.shape[3] ** 0.5).masked_fill(torch.ones(PROMPT, PROMPT).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1).mean(1)
    last = weights[:, -1, :-1].topk(KEPT - 1).indices.sort().values
    assert torch.equal(held("tova", model, KEPT, x).view(0).positions[:, :-1], last)
    heavy = weights[:, :, : PROMPT - 4].sum(1).topk(KEPT - 4).indices.sort().values
    assert torch.equal(held("h2o", model, KEPT, x).view(0).positions[:, : KEPT - 4], heavy)


def test_sinks_move_in_front_of_the_window_by_their_rotated_part() -> None:
    """One layer, whose entries know nothing of each other: as if the first four had been read right in front of the last ones."""
    model, x = decoder(PLAIN, layers=1), drawn(PROMPT + 1)
    cache, exact = policy_of("streaming:9").cache(1, 2, "cpu"), plain(model)
    read(model, cache, x[:, :PROMPT])
    cache.settle()
    ours = read(model, cache, x[:, PROMPT:], PROMPT)
    read(model, exact, torch.cat((x[:, :4], x[:, PROMPT - 4 : PROMPT]), 1), PROMPT - 8)
    torch.testing.assert_close(ours, read(model, exact, x[:, PROMPT:], PROMPT), rtol=1e-4, atol=1e-5)


def test_entries_close_up_by_their_rotated_part() -> None:
    model, x = decoder(PLAIN, layers=1), drawn(PROMPT + 1)
    exact, fresh = plain(model), plain(model)
    read(model, exact, x[:, :PROMPT])
    near = closed_up(model, exact, [torch.arange(10, PROMPT).expand(2, -1)], room=4)
    read(model, fresh, x[:, 10:PROMPT])
    torch.testing.assert_close(read(model, near, x[:, PROMPT:], 10), read(model, fresh, x[:, PROMPT:], 10), rtol=1e-4, atol=1e-5)
