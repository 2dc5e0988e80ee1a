"""Entries of a layer from which one goes for each that comes: in place, and the same as when all that stays is laid out anew."""

import pytest
import torch
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policy import Evictor
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.policy_memory import PolicyMemory, policy_of
from mmsdk.kv.shelf import Shelf

CONFIG = DecoderConfig(vocabulary=50, width=24, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=512)
POLICIES = ["window:20", "streaming:20", "h2o:20", "tova:20", "random:20", "keydiff:20,interval=1", "snapkv:20,window=4,interval=1"]


class Anew(Entries):
    """The slow form: every eviction lays out anew all that stays."""

    def drop(self, index: Tensor, room: int = 0) -> None:
        self.keep(index, True, room)


def slow(memory: PolicyMemory, rows: int) -> PolicyCache:
    cache = memory.cache(CONFIG.layers, rows, "cpu")
    for layer, store in enumerate(cache.stores):
        assert isinstance(store, Shelf)
        store.entries = Anew(layer, CONFIG.layers)
    return cache


@pytest.fixture(scope="module")
def model() -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(CONFIG).state_dict().items()}
    return Decoder.of(CONFIG, {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()})


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_what_goes_in_place_goes_as_if_all_were_laid_out_anew(model: Decoder, name: str, rows: int) -> None:
    """Over an answer longer than the spare slots, with a fork amid it that goes its own way and a window read behind it."""
    memory = policy_of(name)
    assert isinstance(memory.policy, Evictor) and memory.policy.interval == 1
    tokens = torch.randn(rows, 120, CONFIG.width, generator=torch.Generator().manual_seed(1))
    caches = memory.cache(CONFIG.layers, rows, "cpu"), slow(memory, rows)
    forks = []

    def read(start: int, stop: int) -> None:
        outs = [model(tokens[:, start:stop], cache.position[:, None] + torch.arange(stop - start), cache) for cache in caches]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
        for layer in range(CONFIG.layers):
            ours, wanted = (cache.store(layer).entries for cache in caches if isinstance(cache.store(layer), Shelf))
            assert torch.equal(ours.positions, wanted.positions) and torch.equal(ours.values, wanted.values)
            assert torch.equal(ours.keys, wanted.keys) and ours.whole

    read(0, 40)
    for cache in caches:
        cache.settle()
    for step in range(40, 80):
        read(step, step + 1)
        if step == 50:
            forks = [(cache.fork(), cache.view(0).keys.clone()) for cache in caches[:1]]
    read(80, 90)
    for step in range(90, 120):
        read(step, step + 1)
    for fork, before in forks:
        # the memory that both shared was not moved under it
        assert torch.equal(fork.view(0).keys, before)
        model(tokens[:, 51:52], fork.position[:, None], fork)
        assert fork.view(0).keys.shape == before.shape


def test_spare_slots_are_filled_before_anything_is_laid_out_anew() -> None:
    """An entry that goes costs no memory of its own, and what is allocated stays bounded."""
    entries, x = Entries(0, 1), torch.randn(1, 2, 300, 4, generator=torch.Generator().manual_seed(2))

    def come(start: int, stop: int) -> None:
        at = torch.arange(start, stop)[None]
        entries.append(Arriving.of(at, at[:, 0]), x[:, :, start:stop], x[:, :, start:stop])

    come(0, 64)
    places, held = set[int](), list(range(64))
    for step in range(64, 300):
        come(step, step + 1)
        held.append(step)
        gone = 7 * step % 65
        del held[gone]
        columns = torch.arange(64)
        entries.drop((columns + (columns >= gone)).view(1, 1, -1), 1)
        assert entries.positions[0, 0].tolist() == held and torch.equal(entries.keys, x[:, :, held])
        places.add(entries.keys.untyped_storage().data_ptr())
        assert entries.span <= 2 * (64 + 64 // 16 + 2)
    assert len(places) < 236 // 4 + 2
