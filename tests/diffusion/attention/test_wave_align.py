"""WaveAlign and the cache model: orders are permutations that pay or are left out, and hits are those of a cache simulated one by one."""

import os
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.attention.cache_model import Machine, Traffic, traffic
from mmsdk.diffusion.attention.wave_align import Alignment, WaveAlign, united

LARGE = 2**40


def families(rows: int, columns: int, groups: int, h: int = 2, share: float = 0.2) -> Tensor:
    """Rows of a few kinds, shuffled: those of a kind read the same blocks but for a few."""
    draw = torch.Generator().manual_seed(0)
    kinds = torch.rand(h, groups, columns, generator=draw) < share
    kind = torch.randint(0, groups, (h, rows), generator=draw)
    noise = torch.rand(h, rows, columns, generator=draw) < 0.02
    return (torch.stack([kinds[head][kind[head]] for head in range(h)]) ^ noise)[None]


def natural(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[2], dtype=torch.int32).expand(mask.shape[:3])


@pytest.mark.parametrize(("rows", "wave"), [(200, 16), (133, 132), (50, 64), (1, 8), (97, 1)])
def test_an_order_is_a_permutation_of_every_head_and_never_fetches_more(rows: int, wave: int) -> None:
    mask = families(rows, 64, 5)
    mask[0, 1, : rows // 3] = False
    order = WaveAlign(wave=wave)(mask, LARGE).row_order
    assert order.dtype == torch.int32
    assert torch.equal(order.long().sort(-1).values, torch.arange(rows).expand(1, 2, rows))
    assert (united(mask, order, wave) <= united(mask, natural(mask), wave)).all()


def test_rows_of_a_kind_come_together_and_waves_descend() -> None:
    mask = families(256, 128, 4)
    order = WaveAlign(wave=16)(mask, LARGE).row_order
    assert (united(mask, order, 16) < 0.6 * united(mask, natural(mask), 16)).all()
    assert not torch.equal(order[0, 0], order[0, 1])
    counts = mask.sum(-1).gather(2, order.long()).unflatten(2, (-1, 16))
    assert (counts.diff(dim=-1) <= 0).all()


def test_two_kinds_of_rows_take_a_wave_each() -> None:
    mask = torch.zeros(1, 1, 32, 8, dtype=torch.bool)
    mask[0, 0, ::2, :4], mask[0, 0, 1::2, 4:] = True, True
    order = WaveAlign(wave=16)(mask, LARGE).row_order[0, 0].tolist()
    assert sorted((sorted(order[:16]), sorted(order[16:]))) == [list(range(0, 32, 2)), list(range(1, 32, 2))]


def test_what_does_not_pay_is_skipped() -> None:
    shuffled = families(64, 64, 4)
    everything = torch.ones_like(shuffled)
    alike = shuffled[:, :, :1].expand(-1, -1, 64, -1)
    align = WaveAlign(wave=8)
    for mask in (everything, alike, torch.zeros_like(shuffled)):
        assert torch.equal(align(mask, LARGE).row_order, natural(mask))
    assert torch.equal(align(shuffled, align.cache).row_order, natural(shuffled))
    assert not torch.equal(align(shuffled, align.cache + 1).row_order, natural(shuffled))


def test_an_order_is_used_again_while_its_mask_hardly_changes() -> None:
    mask = families(64, 64, 4)
    align = WaveAlign(wave=8, changed=0.01)
    first = align(mask, LARGE)
    little, much = mask.clone(), mask.clone()
    little[0, 0, 0, :20] ^= True
    much[0, 0] = families(64, 64, 4).flip(2)[0, 1]
    assert torch.equal(align(little, LARGE, first).row_order, first.row_order)
    changed = align(much, LARGE, first)
    assert not torch.equal(changed.row_order[0, 0], first.row_order[0, 0]) and torch.equal(changed.row_order[0, 1], first.row_order[0, 1])
    assert torch.equal(align(mask[:, :1], LARGE, first).row_order, align(mask[:, :1], LARGE).row_order)
    other = Alignment(first.row_order, ~mask)
    assert torch.equal(align(mask, LARGE, other).row_order, first.row_order)


BITS = """
import torch
from mmsdk.diffusion.attention.wave_align import WaveAlign
from mmsdk.kernels.ops.block_sparse import OP, listed
draw = torch.Generator().manual_seed(0)
query, keys, values = (torch.randn(1, 2, 100, 16, generator=draw) for _ in range(3))
kinds = torch.rand(2, 2, 7, generator=draw) < 0.5
mask = torch.stack([kinds[head][torch.arange(7) % 2] for head in range(2)])[None]
order = WaveAlign(wave=3)(mask, 2**40).row_order
assert (order != torch.arange(7)).any()
runs = [OP.plan(query, keys, values, *listed(mask), (16, 16), 0.25, None, None, row, None).run() for row in (None, order)]
assert all(torch.equal(a, b) for a, b in zip(*runs))
assert not runs[0][0].isnan().any()
"""


def test_the_kernel_gives_the_same_bits_in_any_order() -> None:
    """In Triton's interpreter, in a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def slow_traffic(mask: np.ndarray, order: np.ndarray, block_bytes: int, machine: Machine) -> Traffic:
    """One read after another; a set is a dictionary in the order of last use."""
    queue = [
        [head * mask.shape[2] + int(column) for column in mask[head, order[head, turn]].nonzero()[0]]
        for first in range(0, len(mask), machine.abreast)
        for turn in range(mask.shape[1])
        for head in range(first, min(first + machine.abreast, len(mask)))
        if mask[head, order[head, turn]].any()
    ]
    ways = max(1, min(machine.ways, machine.cache // block_bytes))
    sets: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(max(1, machine.cache // (block_bytes * ways)))]
    running: list[list[int]] = []
    reads = hits = steps = 0
    while queue or any(running):
        running = [rest for rest in running if rest]
        while queue and len(running) < machine.cores * machine.programs:
            running.append(list(queue.pop(0)))
        wanted = [rest.pop(0) for rest in running]
        there = {block for block in wanted if block in sets[block % len(sets)]}
        for block in sorted(there):
            sets[block % len(sets)].move_to_end(block)
        for block in sorted(set(wanted) - there):
            home = sets[block % len(sets)]
            if len(home) == ways:
                home.popitem(last=False)
            home[block] = None
        reads += len(wanted)
        hits += len(wanted) - len(set(wanted) - there)
        steps += 1
    return Traffic(reads, hits, steps)


@pytest.mark.parametrize(
    "machine",
    [
        Machine(4, 2, 6400, 4),
        Machine(1, 1, 1200, 16),
        Machine(7, 1, 3000, 1),
        Machine(132, 1, 50, 4),
        Machine(8, 1, 3000, 4, abreast=2),
        Machine(4, 2, 6400, 4, abreast=3),
    ],
    ids=str,
)
def test_the_cache_model_is_a_cache_simulated_read_by_read(machine: Machine) -> None:
    mask = families(40, 30, 3, h=3, share=0.4)[0].numpy()
    mask[0, 5:9] = False
    draw = np.random.default_rng(0)
    for order in (np.tile(np.arange(40), (3, 1)), np.stack([draw.permutation(40) for _ in range(3)])):
        assert traffic(mask, order, 100, machine) == slow_traffic(mask, order, 100, machine)


def test_the_cache_model_by_hand() -> None:
    """Two programs in turn over the same two blocks: together half is found; one at a time, only where the cache is large enough."""
    mask, order = np.ones((1, 2, 2), dtype=bool), np.array([[0, 1]])
    assert traffic(mask, order, 1, Machine(2, 1, 1, 1)) == Traffic(4, 2, 2)
    assert traffic(mask, order, 1, Machine(1, 1, 1, 1)) == Traffic(4, 0, 4)
    assert traffic(mask, order, 1, Machine(1, 1, 2, 2)) == Traffic(4, 2, 4)
    assert traffic(~mask, order, 1, Machine()).hit_ratio == 0.0


def test_aligned_rows_find_more_in_a_small_cache() -> None:
    mask = families(512, 256, 8)
    wave = Machine(cores=16, cache=64, ways=16)
    order = WaveAlign(wave=16)(mask, LARGE).row_order
    before, after = (traffic(mask[0].numpy(), x[0].numpy(), 1, wave).hit_ratio for x in (natural(mask), order))
    assert before < 0.6 and after > before + 0.2


def test_heads_abreast_share_little_until_their_rows_are_aligned() -> None:
    """Six heads, of which four rows each run at one time: whatever they share is shared by these four."""
    mask, machine = families(240, 120, 10, h=6, share=0.2), Machine(cores=24, cache=240, abreast=6)
    order = WaveAlign(wave=machine.wave)(mask, LARGE).row_order
    before, after = (traffic(mask[0].numpy(), x[0].numpy(), 1, machine).hit_ratio for x in (natural(mask), order))
    assert machine.wave == 4 and before < 0.45 and after > before + 0.25


def test_longest_rows_first_end_no_later() -> None:
    """Within a wave as long as the head: the order by count is list scheduling, longest first."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(1, 1, 60, 40, generator=draw) < torch.rand(1, 1, 60, 1, generator=draw)
    order = WaveAlign(wave=60, dense=1.0)(mask, LARGE).row_order
    steps = [traffic(mask[0].numpy(), x[0].numpy(), 1, Machine(7, 1, 10, 1)).steps for x in (natural(mask), order)]
    assert steps[1] <= steps[0]
    assert (mask[0, 0].sum(-1)[order[0, 0].long()].diff() <= 0).all()
