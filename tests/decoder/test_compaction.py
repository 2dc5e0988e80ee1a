"""Compaction that carries a cache on: what stays is not read again, and stands where it should, whatever went."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dsa import Lightning
from mmsdk.attention.mla import Latent
from mmsdk.decoder.compaction import closed_up, compact
from mmsdk.decoder.rope import Dynamic, Sections
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import InputError, ModelError
from mmsdk.kv.dense import DenseCache

SIZES = {"vocabulary": 64, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "inner": 48, "context": 256}
NOTHING = torch.zeros(1, 0, dtype=torch.long)


def made(**changed: object) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder(DecoderConfig(**{**SIZES, **changed})).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.normal_(0, 0.3, generator=generator).add_(float(parameter.ndim == 1))
    return decoder


def ids_of(count: int, rows: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(0, 64, (rows, count), generator=torch.Generator().manual_seed(seed))


def empty(decoder: Decoder, rows: int = 1, capacity: int = 8) -> DenseCache:
    config = decoder.config
    return DenseCache.allocate(config.layers, rows, config.kv_heads, config.head_dim, capacity, torch.float32, "cpu")


def read(decoder: Decoder, ids: Tensor, cache: DenseCache, first: int = 0) -> Tensor:
    return decoder(decoder.embed(ids), first + torch.arange(ids.shape[1]).expand_as(ids), cache)


def test_what_stays_is_neither_changed_nor_read_again() -> None:
    """Positions "keep": entries bit for bit, in the same cache, and only the summary goes through the layers."""
    decoder, cache = made(), empty(made())
    read(decoder, ids_of(20), cache)
    index = [torch.tensor([[0, 1, 5 + layer, 9, 19]]) for layer in range(3)]
    before = [cache.view(layer).picked(chosen) for layer, chosen in enumerate(index)]
    passed = list[int]()
    handle = decoder.layers[0].register_forward_hook(lambda module, inputs, output: passed.append(output.shape[1]))
    for positions, summary in (("keep", NOTHING), ("keep", ids_of(3, seed=2)), ("close", ids_of(3, seed=2))):
        source = cache.fork()
        after = compact(decoder, source, index, summary, positions)
        assert (after is source) == (positions == "keep")
        for layer, kept in enumerate(before):
            view = after.view(layer)
            assert torch.equal(view.values[:, :, :5], kept.values) and view.keys.shape[2] == 5 + summary.shape[1]
            if positions == "keep":
                assert torch.equal(view.keys[:, :, :5], kept.keys) and torch.equal(view.positions[:, :5], kept.positions)
            else:
                assert view.positions.tolist() == [list(range(8))]
        assert int(after.position[0]) == (20 if positions == "keep" else 5) + summary.shape[1]
    handle.remove()
    assert passed == [3, 3] and cache.view(0).keys.shape[2] == 20


def test_after_keeping_positions_it_goes_on_as_if_the_rest_were_masked() -> None:
    decoder, whole = made(), empty(made())
    read(decoder, ids_of(16), whole)
    chosen = torch.tensor([[0, 2, 3, 7, 12, 13, 15]])
    thinned, more = compact(decoder, whole.fork(), [chosen] * 3, NOTHING, "keep"), ids_of(1, seed=3)
    seen = torch.zeros(1, 1, 1, 17, dtype=torch.bool)
    seen[..., chosen[0]] = seen[..., 16] = True
    wanted = decoder(decoder.embed(more), torch.tensor([[16]]), whole, seen)
    torch.testing.assert_close(decoder(decoder.embed(more), torch.tensor([[16]]), thinned), wanted, rtol=1e-5, atol=1e-5)


def test_closed_up_keys_are_those_of_tokens_that_stand_there() -> None:
    """In the first layer a key depends on its token and its position alone: as if what stays had been read anew."""
    decoder, cache, ids = made(), empty(made()), ids_of(24)
    read(decoder, ids, cache)
    index = [torch.tensor([[1, 4, 5, 11, 23]]), torch.tensor([[0, 4, 6, 22, 23]]), torch.tensor([[1, 4, 5, 11, 23]])]
    closed, anew = closed_up(decoder, cache, index, room=4), empty(decoder)
    read(decoder, ids[:, index[0][0]], anew)
    torch.testing.assert_close(closed.view(0).keys, anew.view(0).keys, rtol=1e-5, atol=1e-5)
    # in the others, by complex numbers: channel i and channel i + 4 turn together, at the speed 10,000^(-i / 4)
    for layer, chosen in enumerate(index):
        kept = cache.view(layer).picked(chosen)
        back = (torch.arange(5) - chosen[0]).double()[:, None] * 10_000.0 ** -(torch.arange(4).double() / 4)
        turned = torch.complex(*kept.keys.double().chunk(2, -1)) * torch.polar(torch.ones_like(back), back)
        wanted = torch.cat((turned.real, turned.imag), -1).float()
        torch.testing.assert_close(closed.view(layer).keys, wanted, rtol=1e-5, atol=1e-5)
    # layers with the same positions share what is made of them
    assert closed.next(0) is closed.next(1) and closed.nbytes == 2 * 3 * 2 * 8 * 9 * 4


def test_closing_up_a_beginning_that_is_gone_changes_nothing() -> None:
    """Attention goes by distances: tokens 40 to 49 alone, moved to 0 to 9, are followed as before."""
    decoder, late, early = made(), empty(made()), empty(made())
    read(decoder, ids_of(10), late, first=40)
    everything = torch.arange(10)[None]
    early, more = closed_up(decoder, late, [everything] * 3, room=1), ids_of(1, seed=5)
    wanted = decoder(decoder.embed(more), torch.tensor([[50]]), late)
    torch.testing.assert_close(decoder(decoder.embed(more), torch.tensor([[10]]), early), wanted, rtol=1e-4, atol=1e-4)


def test_rows_of_unequal_length_close_up_each_by_itself() -> None:
    decoder, cache = made(), empty(made(), rows=2)
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    decoder(decoder.embed(ids_of(6, rows=2)), positions, cache)
    closed = closed_up(decoder, cache, [torch.tensor([[1, 2, 5], [0, 3, 5]])] * 3, room=2)
    assert closed.view(1).positions.tolist() == [[-1, 0, 1], [0, 1, 2]] and closed.position.tolist() == [2, 3]
    assert closed.view(1).lengths.tolist() == [2, 3]


def test_an_endless_text_stays_within_its_bound() -> None:
    """A hundred compactions: the same bytes, never more entries, positions within the bound; the first tokens are what they were."""
    decoder, sizes = made(layers=1), set[int]()
    cache = empty(decoder, capacity=32)
    for step in range(110):
        read(decoder, ids_of(8, seed=step), cache, first=int(cache.position[0]))
        view = cache.view(0)
        assert view.keys.shape[2] <= 32 and int(view.positions.max()) < 32
        sizes.add(cache.nbytes)
        if view.keys.shape[2] > 24:
            index = torch.cat((torch.arange(2), torch.arange(view.keys.shape[2] - 16, view.keys.shape[2])))[None]
            cache = closed_up(decoder, cache, [index], room=14)
    assert sizes == {2 * 2 * 8 * 32 * 4}
    first, anew = empty(decoder), empty(decoder)
    read(decoder, ids_of(8, seed=0), first)
    read(decoder, ids_of(8, seed=109), anew)
    torch.testing.assert_close(cache.view(0).keys[:, :, :2], first.view(0).keys[:, :, :2], rtol=0, atol=0)
    held = cache.view(0).keys.shape[2]
    last = closed_up(decoder, cache, [torch.arange(held - 8, held)[None]], room=0)
    torch.testing.assert_close(last.view(0).keys, anew.view(0).keys, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_moved_is_refused() -> None:
    latent = made(kv_heads=1, head_dim=10, attention=Latent(q_rank=8, kv_rank=16, nope=6, rope=4, value=5, indexer=Lightning(2, 6, 4)))
    wide = DenseCache.allocate(3, 1, 1, latent.config.entry, 8, torch.float32, "cpu")
    read(latent, ids_of(4), wide)
    with pytest.raises(ModelError, match="cannot be moved"):
        closed_up(latent, wide, [torch.tensor([[1, 3]])] * 3, room=0)
    for changed in ({"rope_sections": Sections((1, 1, 2))}, {"rope_scaling": Dynamic(2.0, 16)}):
        decoder = made(**changed)
        cache = empty(decoder)
        read(decoder, ids_of(4), cache)
        with pytest.raises(ModelError, match="cannot be moved"):
            closed_up(decoder, cache, [torch.tensor([[1, 3]])] * 3, room=0)
    decoder = made()
    with pytest.raises(InputError, match="2 of them for 3 layers"):
        compact(decoder, empty(decoder), [torch.zeros(1, 0, dtype=torch.long)] * 2, NOTHING)
