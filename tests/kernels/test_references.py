"""The references against slow, independent expressions in float64, and against torch's own functions.

Whoever adds a file to kernels/ops adds its truth to TRUTHS.
"""

import itertools
import math
import sys
from collections.abc import Callable
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels import pairs
from mmsdk.kernels.case import TOLERANCE, Result
from mmsdk.kernels.ops import dpp_greedy as dpp
from mmsdk.kernels.ops import farthest_point as farthest_points
from mmsdk.kernels.ops import find, names
from mmsdk.kernels.ops.assign_and_merge import assign_and_merge, nearest_centre, weighted_merge
from mmsdk.kernels.ops.block_worth import block_worth
from mmsdk.kernels.ops.dpp_greedy import dpp_greedy
from mmsdk.kernels.ops.drop_twins import drop_twins
from mmsdk.kernels.ops.farthest_point import farthest_point
from mmsdk.kernels.ops.gather import gather
from mmsdk.kernels.ops.gemv import gemv_int4, gemv_int8
from mmsdk.kernels.ops.kv_round import kv_round
from mmsdk.kernels.ops.rms_norm import add_rms_norm, rms_norm
from mmsdk.kernels.ops.sample import sample
from mmsdk.kernels.ops.small_gemm import small_gemm_int4, small_gemm_int8
from mmsdk.kernels.ops.swiglu import swiglu
from mmsdk.kernels.rounding import LEVELS, Codes, decode
from mmsdk.kernels.turbo import centroids, rotation
from mmsdk.kernels.weights import pack, unpack


def true_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Result:
    total = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    out = F.rms_norm(total.double(), x.shape[-1:], weight.double() + offset, eps)
    return (out,) if residual is None else (out, total)


def true_swiglu(gate_up: Tensor) -> Result:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    return (gate * torch.special.expit(gate) * up,)


def true_rope(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, sections: tuple[int, ...], interleaved: bool, turns: bool) -> Result:
    """Complex numbers times numbers on the unit circle, pair by pair."""
    tables = [table for table, count in enumerate(sections) for _ in range(count)]
    if turns:
        # slices of every third pair, as in transformers' Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope
        tables = [0] * len(tables)
        for table in range(1, len(sections)):
            for pair in range(table, min(3 * sections[table], len(tables)), 3):
                tables[pair] = table

    def turned(x: Tensor) -> Tensor:
        out = x.double().clone()
        for pair, table in enumerate(tables):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + len(tables))
            turn = torch.complex(cos[table, :, :, pair].double(), sin[table, :, :, pair].double())[:, None]
            z = torch.complex(x[..., a].double(), x[..., b].double()) * turn
            out[..., a], out[..., b] = z.real, z.imag
        return out

    return turned(query), turned(keys)


def true_gather(x: Tensor, index: Tensor) -> Result:
    empty = [0.0] * x.shape[2]
    rows = [[x[b, i].tolist() if 0 <= i < x.shape[1] else empty for i in row] for b, row in enumerate(index.tolist())]
    return (torch.tensor(rows, dtype=torch.float64).view(*index.shape, x.shape[2]),)


def attended(query: Tensor, keys: Tensor, values: Tensor, scale: float, sink: float | None) -> tuple[Tensor, float]:
    """One query of one head over the entries that it sees."""
    scores = keys.double() @ query.double() * scale
    if sink is not None:
        scores = torch.cat((scores, torch.tensor([sink], dtype=torch.float64)))
    if not len(scores):
        return torch.zeros(values.shape[1], dtype=torch.float64), -math.inf
    return scores.softmax(0)[: len(keys)] @ values.double(), float(scores.logsumexp(0))


def true_flash_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: int,
    scale: float,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    key_counts: Tensor | None,
) -> Result:
    h, group = query.shape[1], query.shape[1] // keys.shape[1]
    out = torch.zeros(*query.shape[:2], values.shape[2], dtype=torch.float64)
    lse = torch.zeros(query.shape[:2], dtype=torch.float64)
    for row in range(len(query_starts) - 1):
        first, begin = int(query_starts[row]), int(key_starts[row])
        s, t = int(query_starts[row + 1]) - first, int(key_starts[row + 1]) - begin
        t = t if key_counts is None else int(key_counts[row])
        for i in range(s):
            at = t - s + i
            seen = [begin + j for j in range(t) if (j <= at or not causal) and (not window or abs(j - at) < window)]
            for head in range(h):
                k, v = keys[seen, head // group], values[seen, head // group]
                sink = None if sinks is None else float(sinks[head])
                out[first + i, head], lse[first + i, head] = attended(query[first + i, head], k, v, scale, sink)
    return out, lse


def true_paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    bits: str,
    *older: Tensor,
) -> Result:
    """Token by token; of codes, number by number."""
    b, h, d = query.shape
    group, page = h // keys.shape[2], keys.shape[1]
    out, lse = torch.zeros(b, h, d, dtype=torch.float64), torch.zeros(b, h, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        places = [(int(table[row, j // page]), j % page) for j in range(length)]
        blocks, slots = [block for block, _ in places], [slot for _, slot in places]
        for head in range(h):
            k, v = (cache[blocks, slots, head // group].double() for cache in (keys, values))
            if bits:
                past = [int(older[0][row, i]) for i in range(int(older[1][row]))]
                k, v = (torch.cat((meant(bits, d, past, head // group, *older[at : at + 3]), x)) for at, x in ((2, k), (5, v)))
            k, v = (x[-window:] if window else x for x in (k, v))
            out[row, head], lse[row, head] = attended(query[row, head], k, v, scale, None if sinks is None else float(sinks[head]))
    return out, lse


def meant(bits: str, d: int, blocks: list[int], head: int, codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The tokens of blocks of codes, [t, d]: minimum + code * scale, or what torch's own e4m3 is times the scale.

    Of turbo codes the scale is the length, and the code names the channel of a vector of length 1 that is to be turned back.
    """
    each, found = {"fp8": 8}.get(bits) or int(bits[-1]), list[Tensor]()
    for block in blocks:
        here = codes[block, :, head]
        if bits == "fp8":
            numbers = here.view(torch.float8_e4m3fn).double()
        else:
            numbers = torch.tensor([[row[c * each // 8] >> c * each % 8 & 2**each - 1 for c in range(d)] for row in here.tolist()])
        if bits.startswith("turbo"):
            numbers = centroids(each).double()[numbers] @ rotation(d).double() / d**0.5
        found.append(low[block, :, head].double() + numbers * scale[block, :, head].double())
    return torch.cat(found) if found else torch.zeros(0, d, dtype=torch.float64)


def true_mla_decode(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int) -> Result:
    """The cache as one head whose values are the first channels of its keys."""
    b, h = query.shape[:2]
    out, lse = torch.zeros(b, h, latent, dtype=torch.float64), torch.zeros(b, h, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        seen = [int(table[row, j // 16]) * 16 + j % 16 for j in range(length)]
        entries = cache.flatten(0, 1)[seen] if seen else cache.new_zeros(0, cache.shape[2])
        for head in range(h):
            out[row, head], lse[row, head] = attended(query[row, head], entries, entries[:, :latent], scale, None)
    return out, lse


def true_kv_store(keys: Tensor, values: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> Result:
    """Token by token."""
    both = list[Tensor]()
    for x, cache in ((keys, key_cache), (values, value_cache)):
        stored = cache.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                stored[slot // 16, slot % 16] = x[token]
        both.append(stored)
    return tuple(both)


def true_kv_round(
    blocks: Tensor, source: Tensor, target: Tensor, codes: Tensor, scale: Tensor, low: Tensor, bits: str, channels: bool
) -> Result:
    """Group by group, in Python's float64; a code is the nearest of all that there are, the even one of two as near."""
    codes, scale, low = codes.clone(), scale.clone(), low.clone()
    each, most = {"fp8": 8}.get(bits) or int(bits[3:]), torch.finfo(scale.dtype).max
    signed = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = [code for code in range(256) if not signed[code].isnan()] if bits == "fp8" else list(range(2**each))
    worth = signed[numbers] if bits == "fp8" else torch.tensor(numbers, dtype=torch.float64)
    for layer, (new, old), head in itertools.product(
        range(len(blocks)), zip(target.tolist(), source.tolist(), strict=True), range(blocks.shape[3])
    ):
        x = blocks[layer, old, :, head].double()
        groups = x.T if channels else x
        made = torch.zeros(groups.shape, dtype=torch.int64)
        for i, group in enumerate(groups):
            span, least = float(group.abs().max()) / 448, 0.0
            if bits != "fp8":
                least = float(group.min().clamp(-most, most).to(scale.dtype))
                span = (float(group.max()) - min(float(group.min()), least)) / (2**each - 1)
            span = min(span, most)
            step = float(torch.tensor(span).to(scale.dtype))
            # not below what it was, where it is a float16, but never infinite
            step = step if step >= float(torch.tensor(span)) else float(torch.tensor(min(step * (1 + 2**-10), most)).to(scale.dtype))
            step = step or 1.0
            apart = ((group - least) / step).clamp(worth.min(), worth.max())[:, None].sub(worth).abs()
            near = apart <= apart.amin(1, keepdim=True)
            # of two as near the even one; of the zeros of e4m3 the one with the number's sign
            order = torch.tensor([code % 2 for code in numbers]).expand(len(group), -1)
            order = order + 4 * ((group < 0)[:, None] != (torch.tensor(numbers) >= 128)) if bits == "fp8" else order
            made[i] = torch.tensor(numbers)[order.masked_fill(~near, 99).argmin(1)]
            at = (0, head, i) if channels else (i, head, 0)
            scale[layer, new][at], low[layer, new][at] = step, least
        rows = (made.T if channels else made).tolist()
        width, count = codes.shape[4], 8 // each
        packed = [
            [sum(code << each * place for place, code in enumerate(row[c * count : (c + 1) * count])) for c in range(width)] for row in rows
        ]
        codes[layer, new, :, head] = torch.tensor(packed, dtype=torch.uint8)
    return codes, scale, low


def true_gemv(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Result:
    size = x.shape[1] // scales.shape[1]
    wide = scales.double().repeat_interleave(size, 1)
    if offsets is None:
        return (F.linear(x.double(), codes.double() * wide),)
    numbers = torch.tensor([[half for byte in row for half in (byte % 16, byte // 16)] for row in codes.tolist()], dtype=torch.float64)
    return (F.linear(x.double(), numbers * wide + offsets.double().repeat_interleave(size, 1)),)


def drawn(logits: list[float], temperature: float, k: int, p: float, floor: float, u: float) -> int:
    """One row, in Python: the best tokens first, of equals the earlier ones."""
    if temperature == 0:
        return logits.index(max(logits))
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: k or len(logits)]
    whole, before, left = math.fsum(weights[i] for i in ranked), 0.0, [0.0] * len(logits)
    for i in ranked:
        if i == ranked[0] or p >= 1 or before < p * whole:
            left[i] = weights[i] if weights[i] >= floor else 0.0
        before += weights[i]
    sums = torch.tensor(left, dtype=torch.float64).cumsum(0)
    return int((sums > u * sums[-1]).nonzero()[0])


def true_sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Result:
    settings = zip(logits.tolist(), *(column.tolist() for column in (temperature, top_k, top_p, min_p, uniform)), strict=True)
    return (torch.tensor([drawn(*row) for row in settings]),)


def true_pair_similarity(x: Tensor, y: Tensor) -> Result:
    return (torch.einsum("bnd,bmd->bnm", x.double(), y.double()),)


def earliest(scores: dict[int, float]) -> int:
    """Of the scores within a millionth of the largest, the earliest."""
    bar = max(scores.values()) - 1e-6
    return min(i for i, score in scores.items() if score >= bar)


def true_farthest_point(z: Tensor, first: Tensor, count: int) -> Result:
    """Every least distance anew at every step."""
    rows = []
    for products, start in zip((z.double() @ z.double().mT).tolist(), first.tolist(), strict=True):
        chosen = [start]
        while len(chosen) < count:
            left = (i for i in range(len(products)) if i not in chosen)
            chosen.append(earliest({i: -max(products[i][c] for c in chosen) for i in left}))
        rows.append(chosen)
    return (torch.tensor(rows),)


def true_dpp_greedy(y: Tensor, count: int) -> Result:
    """By what is left of each vector outside the space of those chosen: its square is what the determinant is multiplied by."""
    rows = []
    for left in y.double():
        chosen: list[int] = []
        while len(chosen) < count:
            gains = left.square().sum(dim=1)
            pick = earliest({i: gain for i, gain in enumerate(gains.tolist()) if i not in chosen})
            if gains[pick] > 1e-6:
                direction = left[pick] / gains[pick].sqrt()
                left = left - (left @ direction)[:, None] * direction
            chosen.append(pick)
        rows.append(chosen)
    return (torch.tensor(rows),)


def true_drop_twins(pairs: Tensor, count: int, step: int) -> Result:
    """Round by round: those that stay are chosen one by one, the least alike first and of equals the earliest."""
    rows = []
    for like in pairs.double().tolist():
        left = list(range(len(like)))
        while len(left) > count:
            near = {i: max(like[i][j] for j in left[1::2]) for i in left[::2]}
            stay = len(near) - min(step, len(left) - count, len(near))
            bar = sorted(near.values())[stay - 1] if stay else -1e9
            sure = [i for i in near if near[i] < bar - 1e-6]
            equal = [i for i in near if abs(near[i] - bar) <= 1e-6]
            kept = {*sure, *equal[: stay - len(sure)], *left[1::2]}
            left = [i for i in left if i in kept]
        rows.append(left)
    return (torch.tensor(rows),)


def true_assign_and_merge(z: Tensor, centres: Tensor, x: Tensor, weight: Tensor | None) -> Result:
    """Token by token, group by group."""
    b, n, m = *z.shape[:2], centres.shape[1]
    products = (z.double() @ centres.double().mT).tolist()
    labels = [[earliest(dict(enumerate(row))) for row in rows] for rows in products]
    cosines = [[row[label] for row, label in zip(*both, strict=True)] for both in zip(products, labels, strict=True)]
    shares = torch.ones(b, n) if weight is None else weight
    means, totals = torch.zeros(b, m, x.shape[2], dtype=torch.float64), torch.zeros(b, m, dtype=torch.float64)
    for i, row in enumerate(labels):
        for j in set(row):
            members = [k for k in range(n) if row[k] == j]
            totals[i, j] = shares[i, members].double().sum()
            if totals[i, j] > 0:
                means[i, j] = (x[i, members].double() * shares[i, members, None]).sum(0) / totals[i, j]
    return torch.tensor(cosines).view(b, n), torch.tensor(labels, dtype=torch.int64).view(b, n), means, totals


def spans(starts: list[int] | None, size: int, length: int) -> list[range]:
    """The tokens of each block."""
    bounds = [*range(0, length, size), length] if starts is None else starts
    return [range(*pair) for pair in pairwise(bounds)]


def true_block_sparse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    blocks: Tensor,
    sizes: tuple[int, int],
    scale: float,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    row_order: Tensor | None,
    residual: Tensor | None,
) -> Result:
    """Query by query; the order in which rows are taken is no part of the truth."""
    h, group = query.shape[1], query.shape[1] // keys.shape[1]
    out, lse = torch.zeros(query.shape, dtype=torch.float64), torch.zeros(query.shape[:3], dtype=torch.float64)
    for b, head in itertools.product(range(len(query)), range(h)):
        k, v = keys[b, head // group], values[b, head // group]
        columns = spans(None if key_starts is None else key_starts[b, head // group].tolist(), sizes[1], len(k))
        for row, tokens in enumerate(spans(None if query_starts is None else query_starts[b, head].tolist(), sizes[0], query.shape[2])):
            names = blocks[b, head, row, : int(counts[b, head, row])].tolist()
            seen = [j for name in names if 0 <= name < len(columns) for j in columns[name]]
            for i in tokens:
                out[b, head, i], lse[b, head, i] = attended(query[b, head, i], k[seen], v[seen], scale, None)
    return out if residual is None else out + residual.double(), lse


def true_block_gather(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    bias: Tensor,
    valid: Tensor,
    starts: Tensor,
    size: int,
    scale: float,
) -> Result:
    """Token by token: a bias moves the score of each token of its block."""
    b, h, d = query.shape
    group, t = h // keys.shape[1], keys.shape[2]
    out, lse = torch.zeros(b, h, d, dtype=torch.float64), torch.full((b, h), -torch.inf, dtype=torch.float64)
    for row, head in itertools.product(range(b), range(h)):
        shared = head // group
        pairs = zip(index[row, shared].tolist(), bias[row, shared].tolist(), strict=True)
        columns = [(int(starts[row]) + block * size + slot, added) for block, added in pairs if block >= 0 for slot in range(size)]
        read = [(column, added) for column, added in columns if column < t and valid[row, column]]
        if read:
            k, v = (x[row, shared, [column for column, _ in read]].double() for x in (keys, values))
            scores = k @ query[row, head].double() * scale + torch.tensor([added for _, added in read], dtype=torch.float64)
            out[row, head], lse[row, head] = scores.softmax(0) @ v, scores.logsumexp(0)
    return out, lse


def true_block_worth(query: Tensor, high: Tensor, low: Tensor | None, bias: Tensor, scale: float, together: bool) -> Result:
    """Block by block and channel by channel: the larger of two products, or the only one."""
    b, h, s, _ = query.shape
    g, n = high.shape[1:3]
    out = torch.full((b, g, h // g, s, n), -torch.inf, dtype=torch.float64)
    for row, head, token, block in itertools.product(range(b), range(h), range(s), range(n)):
        shared = head // (h // g)
        if bias[row, shared, block] > -torch.inf:
            q = query[row, head, token].double()
            ends = [q * edge[row, shared, block].double() for edge in (high, low) if edge is not None]
            worth = torch.stack(ends).amax(0).sum() * scale
            out[row, shared, head % (h // g), token, block] = worth + bias[row, shared, block].double()
    return (out.amax(2, keepdim=True) if together else out,)


def true_indexer(query: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, most: int, bias: Tensor | None) -> Result:
    """Entry by entry, then sorted by score and place."""
    (b, s), t = query.shape[:2], keys.shape[1]
    out = torch.full((b, s, min(most, t)), -1)
    for row, token in itertools.product(range(b), range(s)):
        entries = [e for e in range(min(t, int(seen[row, token]))) if bias is None or bias[row, token, e] > -torch.inf]
        dots = (query[row, token].double() @ keys[row, entries].double().T).clamp_min(0)
        scores = weights[row, token].double() @ dots
        best = sorted(e for _, e in sorted(zip((-scores).tolist(), entries, strict=True))[:most])
        out[row, token, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return (out,)


def true_restore(
    kept: Tensor, shares: Tensor, values: Tensor, metric: Tensor, always: Tensor, count: int, rounds: int, rho: float
) -> Result:
    """Row by row: what every single swap does to the drift, computed anew from the whole set that is then dropped."""
    best = kept.clone()
    for b, head, row in itertools.product(*map(range, kept.shape[:3])):
        p, v, g = shares[b, head, row].double(), values[b, head].double(), metric[head].double()

        def drift(out: set[int], p: Tensor = p, v: Tensor = v, g: Tensor = g) -> float:
            lost = torch.stack([p[j] * (v[j] - p @ v) for j in sorted(out)] or [torch.zeros(v.shape[1], dtype=torch.float64)]).sum(0)
            left = max(1 - float(sum(p[j] for j in out)), 1e-4)
            return float(lost @ g @ lost) / left**2

        out = {j for j in range(len(p)) if not kept[b, head, row, j]}
        seen = [(drift(out), sorted(out))]
        free = {j for j in range(len(p)) if not always[j]}
        for turn in range(rounds):
            inside = sorted(free - out)
            moves = min(max(int(rho * count) >> (turn + 1), 1), min(count, len(p)) - int(always.sum()), len(p) - count)
            if moves <= 0:
                break
            back = sorted(sorted(out), key=lambda j, out=out: drift(out - {j}))[:moves]  # type: ignore[misc]
            gone = sorted(inside, key=lambda j, out=out: drift(out | {j}))[:moves]  # type: ignore[misc]
            out = (out - set(back)) | set(gone)
            seen.append((drift(out), sorted(out)))
        _, dropped = min(seen, key=lambda one: one[0])
        best[b, head, row] = True
        best[b, head, row, dropped] = False
    return (best,)


TRUTHS: dict[str, Callable[..., Result]] = {
    "assign_and_merge": true_assign_and_merge,
    "block_gather": true_block_gather,
    "block_sparse": true_block_sparse,
    "block_worth": true_block_worth,
    "dpp_greedy": true_dpp_greedy,
    "drop_twins": true_drop_twins,
    "farthest_point": true_farthest_point,
    "flash_prefill": true_flash_prefill,
    "gather": true_gather,
    "gemv": true_gemv,
    "indexer": true_indexer,
    "kv_round": true_kv_round,
    "kv_store": true_kv_store,
    "mla_decode": true_mla_decode,
    "pair_similarity": true_pair_similarity,
    "paged_decode": true_paged_decode,
    "restore": true_restore,
    "rms_norm": true_rms_norm,
    "rope": true_rope,
    "sample": true_sample,
    "small_gemm": true_gemv,
    "swiglu": true_swiglu,
}


def near(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    """Whole numbers are the same ones."""
    tolerance = tolerance if ours.is_floating_point() else 0.0
    torch.testing.assert_close(ours.double(), truth.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_operation_has_a_truth() -> None:
    assert sorted(TRUTHS) == names()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", sorted(TRUTHS))
def test_the_reference_is_true(name: str, dtype: torch.dtype) -> None:
    op = find(name)
    for case in op.cases:
        truth = TRUTHS[name](*case.make(torch.Generator().manual_seed(0), dtype))
        ours = op.reference(*case.make(torch.Generator().manual_seed(0), dtype))
        assert len(ours) == len(truth)
        for a, b in zip(ours, truth, strict=True):
            near(a, b, TOLERANCE[dtype])


def test_the_public_functions_run_their_references_without_a_gpu() -> None:
    x, weight = normal(3, 8), normal(8, seed=1)
    near(rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6), 1e-5)
    normed, total = add_rms_norm(x, x, weight, 1e-6)
    near(normed, F.rms_norm(2 * x, (8,), weight, 1e-6), 1e-5)
    assert torch.equal(total, 2 * x)
    near(swiglu(x), F.silu(x[:, :4]) * x[:, 4:], 1e-5)
    index = torch.tensor([[2, 0]])
    assert torch.equal(gather(x[None], index), x[None, [2, 0]])
    codes = torch.tensor([[1, 2, 3, 4], [-5, 6, -7, 8]], dtype=torch.int8)
    near(gemv_int8(normal(1, 4), codes, torch.ones(2, 1)), normal(1, 4) @ codes.float().T, 1e-5)
    halves = torch.tensor([[0, 15, 8, 1]], dtype=torch.uint8)
    assert torch.equal(unpack(pack(halves)), halves)
    near(gemv_int4(normal(1, 4), pack(halves), torch.ones(1, 1), torch.full((1, 1), -8.0)), normal(1, 4) @ (halves.float() - 8).T, 1e-5)
    for rows in (1, 3):
        near(small_gemm_int8(normal(rows, 4), codes, torch.ones(2, 1)), normal(rows, 4) @ codes.float().T, 1e-5)
        quarter = torch.full((1, 1), 0.25)
        near(small_gemm_int4(normal(rows, 4), pack(halves), quarter, quarter), normal(rows, 4) @ (halves.float() + 1).T / 4, 1e-5)
    greedy = torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3), torch.rand(3)
    assert torch.equal(sample(x, *greedy), x.argmax(-1))


@pytest.mark.parametrize("bits", ["fp8", "int8", "int4", "int2"])
def test_ka_17_and_ka_18_blocks_remember_nothing_and_a_large_channel_widens_its_own_step_alone(bits: str) -> None:
    """Keys with a large bias in one channel, as Qwen2's have, behind a warm-up with huge numbers, and without one."""
    keys = normal(1, 1, 32, 2, 16)
    keys[..., 5] += 100
    found = list[tuple[Tensor, ...]]()
    for warm in (False, True):
        pools = torch.zeros(1, 1, 32, 2, 16 * LEVELS[bits] // 8, dtype=torch.uint8), *(torch.zeros(1, 1, 1, 2, 16) for _ in range(2))
        for blocks in (keys * 1e4, keys) if warm else (keys,):
            kv_round(blocks, *(torch.zeros(1, dtype=torch.int64),) * 2, *pools, bits, channels=True)
        found.append(pools)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    codes, scale, low = (part[0] for part in found[0])
    apart = (decode(Codes(codes, scale, low), bits, 16, torch.float32) - keys[0]).abs()
    assert (apart <= (keys[0].abs() / 16 if bits == "fp8" else scale * 0.501) + 1e-3).all()
    bound = {"fp8": 0.2, "int8": 0.02, "int4": 0.25, "int2": 1.1}[bits]
    assert apart[..., :5].max() < bound


def test_draws_follow_the_probabilities_that_are_left() -> None:
    """20,000 draws of one row: frequencies within four standard deviations, and nothing outside the nucleus."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(20_000, -1)
    b = len(logits)
    uniform = torch.rand(b, generator=torch.Generator().manual_seed(0))
    ids = sample(logits, torch.ones(b), torch.zeros(b, dtype=torch.int64), torch.full((b,), 0.9), torch.zeros(b), uniform)
    shares = torch.bincount(ids, minlength=4) / b
    assert shares[3] == 0
    assert (shares[:3] - torch.tensor([0.5, 0.3, 0.15]) / 0.95).abs().max() < 4 * (0.25 / b) ** 0.5


def test_clips_whose_pairs_are_too_many_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of them, of which there is room for two at a time; what is chosen is what the slow references choose."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(pairs, "ENTRIES", 2 * 30 * 30)
    for module in (farthest_points, dpp):
        monkeypatch.setattr(module, "product_rows", lambda z, count: (asked.append(z.shape[:2]), pairs.product_rows(z, count))[1])
    z, first = F.normalize(normal(5, 30, 24), dim=2), torch.arange(5) * 7
    assert torch.equal(farthest_points.OP.reference(z, first, 9)[0], true_farthest_point(z, first, 9)[0])
    assert torch.equal(dpp.OP.reference(z, 9)[0], true_dpp_greedy(z, 9)[0])
    assert asked == [(2, 30), (2, 30), (1, 30)] * 2
    # one that is asked for few rows does without the matrix, beside any number of others
    assert [pairs.side_by_side(5, n, count) for n, count in ((30, 1), (43, 43), (20, 9), (30, 9))] == [5, 5, 4, 2]


@settings(max_examples=40, deadline=None)
@given(b=st.integers(1, 3), n=st.integers(1, 30), distinct=st.integers(1, 30), data=st.data())
def test_choices_are_those_of_the_slow_references(b: int, n: int, distinct: int, data: st.DataObject) -> None:
    """PP-12: any shape, one token and all of them, tokens all different or copies of a few."""
    count, seed = data.draw(st.integers(1, n)), data.draw(st.integers(0, 999))
    z = F.normalize(normal(b, distinct, 24, seed=seed), dim=2)[:, torch.arange(n) % distinct]
    first = torch.arange(b) * 7 % n
    assert torch.equal(farthest_point(z, first, count), true_farthest_point(z, first, count)[0])
    y = z * (1 + torch.arange(n) % distinct % 5)[:, None] / 5
    independent = min(count, distinct, 20)
    assert torch.equal(dpp_greedy(y, independent), true_dpp_greedy(y, independent)[0])
    pairs, step = z @ z.mT, data.draw(st.integers(1, 9))
    assert torch.equal(drop_twins(pairs, count, step), true_drop_twins(pairs, count, step)[0])
    cosine, labels, means, totals = assign_and_merge(z, z[:, :count], y)
    truth = true_assign_and_merge(z, z[:, :count], y, None)
    assert torch.equal(labels, truth[1])
    for ours, true in ((cosine, truth[0]), (means, truth[2]), (totals, truth[3])):
        near(ours, true, 1e-5)


def test_a_token_of_no_group_reaches_nobody() -> None:
    """Infinities and NaN in it, and a group that is left without members."""
    x = torch.tensor([[[1.0, 2.0], [torch.inf, torch.nan], [3.0, 6.0]]])
    means, totals = weighted_merge(x, torch.tensor([[1, -1, 1]]), 3, torch.tensor([[1.0, 5.0, 3.0]]))
    assert torch.equal(means, torch.tensor([[[0.0, 0.0], [2.5, 5.0], [0.0, 0.0]]])) and totals.tolist() == [[0.0, 4.0, 0.0]]


def test_less_than_a_millionth_apart_the_earlier_centre_wins() -> None:
    """PP-12: the largest is not the first within a millionth of itself, nor is that the first of all."""
    centres = torch.tensor([[[0.5], [0.5 + 9e-7], [0.5 + 15e-7], [0.1]]])
    cosine, labels = nearest_centre(torch.ones(1, 1, 1), centres)
    assert labels.tolist() == [[1]] and float(cosine) == float(centres[0, 1])


@pytest.mark.parametrize("place", range(4))
def test_block_worth_leaves_its_kernel_for_every_gradient_that_is_wanted(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives none. As on a GPU it would be taken here, and fails where it is."""
    module, generator = sys.modules[block_worth.__module__], torch.Generator().manual_seed(0)
    monkeypatch.setattr(module, "launchable", lambda query: True)
    monkeypatch.setattr(module, "_plan", lambda *arguments: pytest.fail("the kernel is taken"))
    shapes = (1, 2, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4)
    query, high, low, bias = given = [torch.randn(shape, generator=generator) for shape in shapes]
    given[place].requires_grad_()
    block_worth(query, high, low, bias, 1.0, together=False).sum().backward()
    found = given[place].grad
    assert found is not None and bool((found != 0).any())
