"""The refiner against its formulas written row by row, and what it promises of the anchor."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.kv.parts import Block
from mmsdk.kv.selection import BlockLayout
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.memory.refine import Refiner, RefinerConfig

Fill = Callable[[nn.Module, int], dict[str, Tensor]]
CONFIG = RefinerConfig(sight=32, width=16, layers=2, heads=2, inner=24, queries=5)
SIGHT, PRESENT, DELTA = noise_of(1, (2, 7, 32)), torch.tensor([[True, True], [False, True]]), torch.tensor([0.25, 0.5])


@pytest.fixture
def anchor(decoder: Decoder, layout: BlockLayout) -> Block:
    valid = layout.shown(PRESENT)
    valid = torch.cat((valid, torch.tensor([[True, True, False], [True, True, True]])), dim=1)
    shape = decoder.config.layers, 2, decoder.config.kv_heads, layout.slots, decoder.config.head_dim
    return Block(noise_of(2, shape), noise_of(3, shape), valid, 7.0)


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def look(s: dict[str, Tensor], name: str, x: Tensor, at: Tensor, among: list[int]) -> Tensor:
    query = heads_of(line(s, f"{name}.q", x), 2)
    key, value = (heads_of(part, 2) for part in line(s, f"{name}.kv", at[among]).chunk(2, dim=-1))
    seen = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(-1) @ value
    return line(s, f"{name}.o", seen.transpose(0, 1).flatten(1))


def line(s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]


def normed(s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    wide = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    return wide * s[f"{name}.weight"] + s[f"{name}.bias"]


def by_hand(s: dict[str, Tensor], anchor: Block, row: int, layer: int) -> tuple[Tensor, Tensor]:
    cameras = torch.cat([s["sight.camera.weight"][c].expand(n, -1) for c, n in enumerate((4, 3))])
    time = line(s, "sight.time.2", F.gelu(line(s, "sight.time.0", DELTA[row, None]))) + s["sight.token"]
    x = torch.cat((line(s, "sight.project", SIGHT[row]) + cameras, time[None]))
    among = [slot for slot in range(8) if slot == 7 or PRESENT[row, 0 if slot < 4 else 1]]
    for number in range(2):
        name = f"sight.layers.{number}"
        read = normed(s, f"{name}.norm1", x)
        x = x + look(s, f"{name}.look", read, read, among)
        x = x + line(s, f"{name}.mlp.2", F.gelu(line(s, f"{name}.mlp.0", normed(s, f"{name}.norm2", x))))
    z = s["sight.queries"] + look(s, "sight.pool", s["sight.queries"], normed(s, "sight.norm", x), among)
    name, keys, values = f"editors.{layer}", anchor.keys[layer, row], anchor.values[layer, row]
    slots = [slot for slot in range(10) if anchor.valid[row, slot]]
    key, value = (line(s, f"{name}.{letter}", kept.transpose(0, 1).flatten(1)) for letter, kept in (("k", keys), ("v", values)))
    read = (line(s, f"{name}.q", z) @ key[slots].T / math.sqrt(16)).softmax(-1) @ value[slots]
    spread = (key @ read.T / math.sqrt(16)).softmax(-1) @ read
    change = line(s, f"{name}.down", F.gelu(line(s, f"{name}.up", normed(s, f"{name}.norm", spread))))
    dk, dv = (part.unflatten(1, (2, -1)).transpose(0, 1) for part in change.chunk(2, dim=-1))
    new_keys, new_values = keys.clone(), values.clone()
    for slot in slots:
        new_keys[:, slot] += math.tanh(s[f"{name}.key_gate"]) * dk[:, slot]
        new_values[:, slot] += math.tanh(s[f"{name}.value_gate"]) * dv[:, slot]
    return new_keys, new_values


def test_a_refined_block_is_what_the_formulas_say(decoder: Decoder, layout: BlockLayout, anchor: Block, fill: Fill) -> None:
    refiner = Refiner(decoder.config, layout, CONFIG)
    state = fill(refiner, 4)
    refiner.load_state_dict(state)
    with torch.no_grad():
        found = refiner(anchor, SIGHT, PRESENT, DELTA, 9.0)
    for row in range(2):
        for layer in range(decoder.config.layers):
            keys, values = by_hand(state, anchor, row, layer)
            torch.testing.assert_close(found.keys[layer, row], keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found.values[layer, row], values, atol=1e-5, rtol=1e-4)
    assert found.time == 9.0 and found.valid is anchor.valid
    assert not torch.allclose(found.keys, anchor.keys, atol=1e-2)


def test_it_begins_as_nothing_with_gates_of_a_tenth(decoder: Decoder, layout: BlockLayout, anchor: Block) -> None:
    refiner = Refiner(decoder.config, layout, CONFIG)
    found = refiner(anchor, SIGHT, PRESENT, DELTA)
    assert torch.equal(found.keys, anchor.keys) and torch.equal(found.values, anchor.values)
    gates = [gate for editor in refiner.editors for gate in (editor.key_gate, editor.value_gate)]
    assert len(gates) == 6
    torch.testing.assert_close(torch.stack(gates).tanh(), torch.full((6,), 0.1))


def test_shut_gates_leave_the_anchor_bit_for_bit(decoder: Decoder, layout: BlockLayout, anchor: Block, fill: Fill) -> None:
    refiner = Refiner(decoder.config, layout, CONFIG)
    refiner.load_state_dict({name: tensor * (not name.endswith("_gate")) for name, tensor in fill(refiner, 4).items()})
    found = refiner(anchor, SIGHT, PRESENT, DELTA)
    assert torch.equal(found.keys, anchor.keys) and torch.equal(found.values, anchor.values)


def test_invalid_slots_and_what_masked_cameras_show_change_nothing(
    decoder: Decoder, layout: BlockLayout, anchor: Block, fill: Fill
) -> None:
    refiner = Refiner(decoder.config, layout, CONFIG)
    refiner.load_state_dict(fill(refiner, 4))
    other_sight, other_anchor = SIGHT.clone(), Block(anchor.keys.clone(), anchor.values.clone(), anchor.valid, 7.0)
    other_sight[1, :4] += 5
    other_anchor.keys.masked_fill_(~anchor.valid[None, :, None, :, None], 3.0)
    with torch.no_grad():
        before, after = refiner(anchor, SIGHT, PRESENT, DELTA), refiner(other_anchor, other_sight, PRESENT, DELTA)
    real = anchor.valid[None, :, None, :, None].expand_as(anchor.keys)
    torch.testing.assert_close(after.keys[real], before.keys[real])
    assert torch.equal(before.keys[~real], anchor.keys[~real]) and torch.equal(after.keys[~real], other_anchor.keys[~real])


def test_only_the_anchor_counts_and_half_precision_stays(decoder: Decoder, layout: BlockLayout, anchor: Block, fill: Fill) -> None:
    refiner = Refiner(decoder.config, layout, CONFIG)
    refiner.load_state_dict(fill(refiner, 4))
    half = Block(anchor.keys.bfloat16(), anchor.values.bfloat16(), anchor.valid, 7.0)
    with torch.no_grad():
        first = refiner(half, SIGHT, PRESENT, DELTA)
        refiner(first, SIGHT, PRESENT, DELTA)
        again = refiner(half, SIGHT, PRESENT, DELTA)
    assert again.keys.dtype == torch.bfloat16 and torch.equal(first.keys, again.keys) and torch.equal(first.values, again.values)


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="3 heads do not share a width of 16"):
        RefinerConfig(width=16, heads=3)
