"""A memory of frames that fade: what is kept of each, that it stays bounded, and that nothing is lost where nothing has to go."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError, InputError
from mmsdk.kv.parts import Block, whole
from mmsdk.kv.selection import BlockLayout
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.memory.dual import laid
from mmsdk.vla.memory.encode import encode
from mmsdk.vla.memory.frames import Fading, FrameMemory

Moment = tuple[Tensor, Tensor, Tensor, Tensor]
WHOLE = Fading(frames=8, newest=7, fade=1.0)


def visual(block: Block) -> Block:
    """The seven visual slots of a block."""
    return Block(block.keys[..., :7, :], block.values[..., :7, :], block.valid[:, :7], block.time)


def test_where_nothing_has_to_go_a_frame_is_read_behind_all_there_were(
    decoder: Decoder, layout: BlockLayout, moments: list[Moment]
) -> None:
    memory, blocks = FrameMemory(decoder, layout, WHOLE), list[Block]()
    for moment in moments:
        with torch.no_grad():
            expected = encode(decoder, *laid(decoder, layout, *moment), [whole(block) for block in blocks])
        found = memory.see(*moment)
        for layer in range(3):
            mine, theirs = found.cache.view(layer), expected.read.view(layer)
            assert torch.equal(mine.positions, theirs.positions) and torch.equal(mine.valid, theirs.valid)
            real = mine.valid[:, None, :, None].expand_as(mine.keys)
            torch.testing.assert_close(mine.keys[real], theirs.keys[real])
        blocks.append(visual(expected.block))
        last = [int(row.nonzero()[-1]) for row in expected.block.valid]
        torch.testing.assert_close(found.hidden, expected.hidden[[0, 1], last])


@pytest.mark.parametrize("by", ["attention", "novelty"])
def test_memory_is_bounded_and_older_frames_keep_less_but_some(
    by: str, decoder: Decoder, layout: BlockLayout, moments: list[Moment]
) -> None:
    fading = replace(Fading(frames=4, newest=6, fade=0.5, least=2), by=by)
    memory, sizes = FrameMemory(decoder, layout, fading), list[int]()
    for number in range(20):
        context = memory.see(noise_of(number, (2, 7, 32)), *moments[number % 6][1:])
        sizes.append(memory.nbytes)
        view = context.cache.view(0)
        for row in range(2):
            # without gaps, padding aside
            assert view.positions[row][view.valid[row]].tolist() == list(range(int(view.valid[row].sum())))
    assert memory.tokens == (2, 2, 3, 6) and sum(memory.tokens) == fading.most(7)
    assert len(set(sizes[3:])) == 1 and sizes[3] == 2 * 3 * 2 * 2 * 13 * 8 * 4
    memory.reset()
    assert memory.tokens == () and memory.nbytes == 0
    again = memory.see(*moments[0]), FrameMemory(decoder, layout, fading).see(*moments[0])
    torch.testing.assert_close(again[0].hidden, again[1].hidden)


def test_what_is_newest_is_kept(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    """Token by token: of three frames, each that has the smallest largest cosine to what is kept of the one before."""
    memory = FrameMemory(decoder, layout, Fading(frames=3, newest=3, fade=1.0, least=1))
    kept = list[list[int]]()
    for number, moment in enumerate(moments[:3]):
        memory.see(*moment)
        for row in range(2):
            seen = moment[0][row]
            usable = [slot for slot in range(7) if row == 0 or slot >= 4]
            if not number:
                middle = F.normalize(torch.stack([F.normalize(seen[slot], dim=0) for slot in usable]).sum(0), dim=0)
                others = [middle]
            else:
                others = [F.normalize(moments[number - 1][0][row, slot], dim=0) for slot in kept[2 * (number - 1) + row]]
            worth = {slot: 1 - max(float(F.normalize(seen[slot], dim=0) @ other) for other in others) for slot in usable}
            kept.append(sorted(sorted(worth, key=lambda slot: -worth[slot])[:3]))
    for number, part in enumerate(memory.parts()):
        with torch.no_grad():
            # keys of the first layer say which token they are of
            layer = decoder.layers[0]
            keys = layer.attention.qkv(layer.norm1(moments[number][0])).unflatten(2, (-1, 8))[:, :, 4:6].transpose(1, 2)
        for row in range(2):
            torch.testing.assert_close(part.block.keys[0, row], keys[row][:, kept[2 * number + row]], atol=1e-5, rtol=1e-4)


def test_what_the_words_attended_to_is_kept(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    memory, moment = FrameMemory(decoder, layout, Fading(newest=2, least=1, by="attention")), moments[0]
    memory.see(*moment)
    with torch.no_grad():
        embeddings, valid = laid(decoder, layout, *moment)
        everyone = encode(decoder, embeddings, valid, observe=True)
        alone = [
            encode(decoder, embeddings, valid, observe=True, whose=torch.arange(10)[None] == slot).received.mean(0)[:, :7]
            for slot in (7, 8, 9)
        ]
    for row, words in ((0, (0, 1)), (1, (0, 1, 2))):
        worth = torch.stack([alone[word][row] for word in words]).mean(0)
        chosen = sorted(sorted(range(7), key=lambda slot: -float(worth[slot]))[:2])
        expected = everyone.block.keys[:, row][:, :, chosen]
        torch.testing.assert_close(memory.parts()[0].block.keys[:, row], expected, atol=1e-5, rtol=1e-4)


def test_a_frame_that_does_not_fit_is_refused_and_changes_nothing(decoder: Decoder, layout: BlockLayout, moments: list[Moment]) -> None:
    memory = FrameMemory(decoder, layout, WHOLE)
    memory.see(*moments[0])
    with pytest.raises(InputError, match="6 visual tokens"):
        memory.see(moments[1][0][:, 1:], *moments[1][1:])
    assert memory.tokens == (7,)
    with pytest.raises(BudgetError, match="fade is in"):
        Fading(fade=0.0)
