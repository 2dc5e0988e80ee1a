"""Blocks of observations against transformers: one pass over all of them with the block-causal mask, at several decoders."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.parts import Block, Part, whole
from mmsdk.kv.read import ReadCache
from mmsdk.kv.selection import BlockLayout
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import KVCache
from mmsdk.vla.heads.prefix import prefill_blocks
from mmsdk.vla.memory.dual import laid
from mmsdk.vla.memory.encode import Encoded, encode, reading

Moment = tuple[Tensor, Tensor, Tensor, Tensor]


def one_by_one(decoder: Decoder, layout: BlockLayout, moments: Sequence[Moment], window: int) -> list[Encoded]:
    """Every block encoded behind at most `window` - 1 complete ones."""
    out: list[Encoded] = []
    with torch.no_grad():
        for number, moment in enumerate(moments):
            history = [whole(before.block) for before in out[max(0, number - window + 1) :]]
            out.append(encode(decoder, *laid(decoder, layout, *moment), history, float(number), observe=True))
    return out


def in_one_pass(model: PreTrainedModel, embeddings: Tensor, valid: Tensor, slots: int) -> Tensor:
    """What transformers makes of all blocks side by side, the mask written out pair by pair."""
    size = valid.shape[1]
    mask = torch.full((2, 1, size, size), torch.finfo(torch.float32).min)
    for row in range(2):
        for q in range(size):
            for k in range(size):
                if valid[row, k] and k // slots <= q // slots:
                    mask[row, 0, q, k] = 0
    positions = [[max(0, sum(row[: i + 1]) - 1) for i in range(size)] for row in valid.tolist()]
    with torch.no_grad():
        out = model.base_model(inputs_embeds=embeddings, attention_mask=mask, position_ids=torch.tensor(positions), use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden


def test_blocks_one_by_one_are_one_block_causal_pass_of_transformers(
    twins: tuple[PreTrainedModel, Decoder], layout: BlockLayout, moments: list[Moment]
) -> None:
    model, decoder = twins
    rows = [laid(decoder, layout, *moment) for moment in moments[:3]]
    embeddings, valid = (torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))
    found = torch.cat([each.hidden for each in one_by_one(decoder, layout, moments[:3], window=4)], dim=1)
    expected = in_one_pass(model, embeddings, valid, layout.slots)
    torch.testing.assert_close(found[valid], expected[valid], atol=1e-4, rtol=1e-4)
    assert not valid.all() and expected[valid].std() > 0.3


def test_a_full_read_is_what_an_ordinary_cache_holds_of_one_block_causal_pass(
    twins: tuple[PreTrainedModel, Decoder], layout: BlockLayout, moments: list[Moment]
) -> None:
    decoder = twins[1]
    rows = [laid(decoder, layout, *moment) for moment in moments[:3]]
    embeddings, valid = (torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))
    cache = prefill_blocks(decoder, embeddings, valid, torch.arange(30) % 10 == 0).cache
    blocks = one_by_one(decoder, layout, moments[:3], window=4)
    read = ReadCache.of([whole(each.block) for each in blocks], decoder.rotation)
    assert isinstance(read, KVCache) and read.position.tolist() == cache.position.tolist() == valid.sum(1).tolist()
    for layer in range(decoder.config.layers):
        view, ordinary = read.view(layer), cache.view(layer)
        assert torch.equal(view.positions, ordinary.positions) and torch.equal(view.valid, ordinary.valid)
        seen = valid[:, None, :, None].expand_as(view.keys)
        torch.testing.assert_close(view.keys[seen], ordinary.keys[seen], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(view.values[seen], ordinary.values[seen], atol=2e-5, rtol=1e-4)


def test_layers_with_a_rotation_of_their_own_and_norms_behind_them(
    gemmas: tuple[PreTrainedModel, Decoder], layout: BlockLayout, moments: list[Moment]
) -> None:
    model, decoder = gemmas
    rows = [laid(decoder, layout, *moment) for moment in moments[:3]]
    embeddings, valid = (torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))
    blocks = one_by_one(decoder, layout, moments[:3], window=4)
    found, expected = torch.cat([each.hidden for each in blocks], dim=1), in_one_pass(model, embeddings, valid, layout.slots)
    torch.testing.assert_close(found[valid], expected[valid], atol=1e-4, rtol=1e-4)
    cache = prefill_blocks(decoder, embeddings, valid, torch.arange(30) % 10 == 0).cache
    for read in (reading(decoder, [whole(each.block) for each in blocks]), blocks[-1].read):
        for layer in range(3):
            seen = valid[:, None, :, None].expand_as(read.view(layer).keys)
            torch.testing.assert_close(read.view(layer).keys[seen], cache.view(layer).keys[seen], atol=2e-5, rtol=1e-4)
    assert decoder.config.local.layers


def test_after_an_eviction_a_block_still_carries_what_it_read(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    remembered = one_by_one(decoder, layout, moments[:3], window=2)[-1].block
    anew = one_by_one(decoder, layout, moments[1:3], window=2)[-1].block
    real = remembered.valid[:, None, :, None].expand_as(remembered.keys[0])
    # the first layer has not read anything yet, the others have
    torch.testing.assert_close(remembered.keys[0][real], anew.keys[0][real])
    assert not torch.allclose(remembered.keys[-1][real], anew.keys[-1][real], atol=1e-3)


def test_a_read_turns_kept_keys_to_positions_without_gaps(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    blocks = [each.block for each in one_by_one(decoder, layout, moments[:2], window=4)]
    index = torch.tensor([[0, 3, 5, 7, 8, 9], [1, 4, 6, 7, 8, 9]])
    view = ReadCache.of([Part(blocks[0], index, complete=False), whole(blocks[1])], decoder.rotation).view(1)
    for row in range(2):
        slots = [(blocks[0], int(slot)) for slot in index[row]] + [(blocks[1], slot) for slot in range(layout.slots)]
        position = 0
        for place, (block, slot) in enumerate(slots):
            assert bool(view.valid[row, place]) == bool(block.valid[row, slot])
            torch.testing.assert_close(view.values[row, :, place], block.values[1, row, :, slot])
            if not block.valid[row, slot]:
                assert view.positions[row, place] == -1
                continue
            assert view.positions[row, place] == position
            torch.testing.assert_close(view.keys[row, :, place], turned(block.keys[1, row, :, slot], position), atol=1e-5, rtol=1e-4)
            position += 1


def turned(key: Tensor, position: int) -> Tensor:
    out, half = key.clone(), key.shape[1] // 2
    for i in range(half):
        angle = position / 10_000 ** (i / half)
        left, right = key[:, i], key[:, i + half]
        out[:, i], out[:, i + half] = left * math.cos(angle) - right * math.sin(angle), right * math.cos(angle) + left * math.sin(angle)
    return out


def test_what_entries_receive_is_the_mean_over_heads_and_valid_queries(
    decoder: Decoder, layout: BlockLayout, moments: list[Moment]
) -> None:
    blocks = one_by_one(decoder, layout, moments[:2], window=4)
    embeddings, valid = laid(decoder, layout, *moments[1])
    everything = torch.cat((blocks[0].block.valid, valid), dim=1)
    positions = positions_of(everything).tolist()
    layer = decoder.layers[0]
    with torch.no_grad():
        heads = layer.attention.qkv(layer.norm1(embeddings)).unflatten(2, (-1, 8))
    for row in range(2):
        expected = torch.zeros(20)
        queries = [slot for slot in range(10) if valid[row, slot]]
        entries = [entry for entry in range(20) if everything[row, entry]]
        for slot in queries:
            for head in range(4):
                query = turned(heads[row, slot, head][None], positions[row][10 + slot])[0]
                keys = [
                    turned(
                        (blocks[0].block.keys[0, row, head // 2, entry] if entry < 10 else heads[row, entry - 10, 4 + head // 2])[None],
                        positions[row][entry],
                    )[0]
                    for entry in entries
                ]
                expected[entries] += (torch.stack(keys) @ query / math.sqrt(8)).softmax(0) / (4 * len(queries))
        torch.testing.assert_close(blocks[1].received[0, row], expected, atol=1e-5, rtol=1e-4)


def test_rows_are_independent(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    together = one_by_one(decoder, layout, moments[:2], window=4)[1]
    for row in range(2):
        alone = one_by_one(decoder, layout, [tuple(part[row : row + 1] for part in moment) for moment in moments[:2]], window=4)[1]
        real = alone.block.valid[0]
        torch.testing.assert_close(together.block.keys[:, row, :, real], alone.block.keys[:, 0, :, real], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(together.received[:, row], alone.received[:, 0], atol=1e-6, rtol=1e-4)


def test_a_view_is_only_read(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    block: Block = one_by_one(decoder, layout, moments[:1], window=1)[0].block
    read = ReadCache.of([whole(block)], decoder.rotation)
    with pytest.raises(InputError, match="only read"):
        read.advance(torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(InputError, match="only read"):
        read.append(0, block.keys[0], block.values[0])
    with pytest.raises(InputError, match="only read"):
        read.keep(0, torch.zeros(2, 1, dtype=torch.long))
    assert read.fork() is read
    torch.testing.assert_close(read.select(torch.tensor([1])).view(2).keys, read.view(2).keys[1:])


def test_what_does_not_fit_the_layout_is_refused(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    sight, present, ids, said = moments[0]
    with pytest.raises(InputError, match="6 visual tokens of 2 cameras, a block has 7 of 2"):
        laid(decoder, layout, sight[:, 1:], present, ids, said)
    with pytest.raises(InputError, match="6 tokens, a block has 3 slots"):
        laid(decoder, layout, sight, present, ids.repeat(1, 2), said.repeat(1, 2))
    with pytest.raises(InputError, match="each camera has at least 1"):
        BlockLayout(cameras=(4, 0))
    assert BlockLayout().slots == 968
