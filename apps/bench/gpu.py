"""A GPU: prompts, decode over pages, matrices in fewer bits and whole steps by our kernels, beside what the GPU reaches in plain work.

No GPU has run it here, so that no result is kept. Times are the GPU's own (events), the median of rounds after a warm-up.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.console import Cell, busy
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.steps import Steps
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.kernels.older import KINDS, Older
from mmsdk.kernels.ops import find
from mmsdk.kernels.ops.flash_prefill import flash_prefill
from mmsdk.kernels.ops.paged_decode import paged_decode
from mmsdk.kernels.proof import compare
from mmsdk.kernels.rounding import Codes
from mmsdk.kernels.turbo import TURBO, rotation
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.quant.launched import product_int4, product_int8

__all__ = ["Gpu"]

_ROUNDS, _WARM = 20, 3
# What is measured has to agree with its reference first.
_OPS = ("flash_prefill", "paged_decode", "gemv", "small_gemm", "kv_store", "rms_norm", "rope", "swiglu")
# SmolLM2-135M's sizes: hundreds of small kernels a step.
_MODEL = DecoderConfig(vocabulary=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, inner=1536, context=8192)
_AIMS = (("prefill", "share", 0.6), ("prefill", "ratio", 0.95), ("paged decode", "share", 0.85), ("step", "ratio", 1.0))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is measured: a prompt, rows of a context in pages, heads, and the plain work beside them."""

    tokens: int
    context: int
    rows: int
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    side: int = 8192
    copied: int = 2**30
    matrix: tuple[int, int] = (14_336, 4096)
    model: DecoderConfig = _MODEL


@dataclass(frozen=True, slots=True)
class Gpu:
    """A prompt of `tokens` tokens, and `rows` rows of `context` tokens to decode over; heads of 128 channels, four queries to a key."""

    tokens: int = 16_384
    context: int = 8_192
    rows: int = 32

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {what, case, ms, rate, unit, share, ratio}.

        `share` is of the measured roof: of products for prompts, of a copy's bytes for what memory paces. `ratio` is how many times as fast
        as torch's attention a prompt is, and as the same step without a graph a step is.
        """
        for name in ("tokens", "context", "rows"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        if not torch.cuda.is_available():
            raise InputError("it is measured, and torch sees none here; `mmsdk bench kernels` compiles for three without one", item="gpu")
        device = torch.device("cuda")
        with busy("comparing kernels with their references"):
            _proved(device)
        with busy("measuring"):
            return measured(device, Sizes(self.tokens, self.context, self.rows))

    def aims(self, rows: list[dict[str, Cell]]) -> list[dict[str, Cell]]:
        """What was to be reached, and the least of what was."""
        found = list[dict[str, Cell]]()
        for what, of, least in _AIMS:
            reached = min(float(row[of] or 0) for row in rows if row["what"] == what)
            found.append({"aim": f"{what}: {of}", "wanted": least, "reached": round(reached, 3), "met": reached >= least})
        return found


def _proved(device: torch.device) -> None:
    """Raise ModelError where a kernel is not what its reference is: then no number is printed."""
    for name in _OPS:
        op = find(name)
        for row in (compare(name, op, case, torch.bfloat16, device) for case in op.cases):
            if not row.within:
                raise ModelError(f"{row.op} is {row.error:.3g} from its reference on {row.case!r} at {row.dtype}")


@torch.no_grad()
def measured(device: torch.device, sizes: Sizes) -> list[dict[str, Cell]]:
    """All rows, on any device: what runs no kernel runs references."""
    square = torch.randn(sizes.side, sizes.side, device=device, dtype=torch.bfloat16)
    products = 2 * sizes.side**3 / _seconds(partial(torch.mm, square, square), device)
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    copied = 2 * sizes.copied / _seconds(partial(torch.empty_like(source).copy_, source), device)
    rows = [_row("roof", f"product of {sizes.side}", 2 * sizes.side**3 / products, products, "TFLOP/s", 1.0)]
    rows += [_row("roof", f"copy of {sizes.copied / 2**20:.0f} MiB", 2 * sizes.copied / copied, copied, "GB/s", 1.0)]
    for causal in (False, True):
        rows.append(_prefill(device, sizes, causal, products))
    rows += [_decode(device, sizes, kind, copied) for kind in ("bf16", *KINDS)]
    rows += [_product(device, sizes, bits, m, copied) for bits in ("int8", "int4") for m in (1, 16, 64)]
    return rows + [_step(device, sizes, count) for count in (1, 8)]


def _row(what: str, case: str, seconds: float, rate: float, unit: str, share: float | None, ratio: float | None = None) -> dict[str, Cell]:
    scale = {"TFLOP/s": 1e12, "GB/s": 1e9}.get(unit, 1.0)
    return {"what": what, "case": case, "ms": 1e3 * seconds, "rate": rate / scale, "unit": unit, "share": share, "ratio": ratio}


def _prefill(device: torch.device, sizes: Sizes, causal: bool, roof: float) -> dict[str, Cell]:
    s, h, g, d = sizes.tokens, sizes.heads, sizes.kv_heads, sizes.width
    query, keys, values = (torch.randn(s, heads, d, device=device, dtype=torch.bfloat16) for heads in (h, g, g))
    starts = torch.tensor([0, s], dtype=torch.int32, device=device)
    ours = _seconds(partial(flash_prefill, query, keys, values, starts, starts, s, d**-0.5, causal), device)
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (query, keys, values))
    theirs = _seconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=h != g), device)
    work = 4 * s * s * h * d / (2 if causal else 1)
    case = f"{s} tokens, {h} heads of {d} over {g}, {'causal' if causal else 'two-way'}"
    return _row("prefill", case, ours, work / ours, "TFLOP/s", work / ours / roof, theirs / ours)


def _decode(device: torch.device, sizes: Sizes, kind: str, roof: float) -> dict[str, Cell]:
    """Attention of one token a row over pages of 16, or over blocks of 32 of codes behind one page."""
    b, g, d, page = sizes.rows, sizes.kv_heads, sizes.width, 16 if kind == "bf16" else 32
    blocks = -(-sizes.context // page)
    query = torch.randn(b, sizes.heads, d, device=device, dtype=torch.bfloat16)
    order = torch.randperm(b * blocks, device=device).view(b, blocks)
    exact = (b * blocks if kind == "bf16" else b, page, g, d)
    keys, values = (torch.randn(exact, device=device, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((b,), sizes.context if kind == "bf16" else 1, device=device)
    if kind == "bf16":
        work, read = partial(paged_decode, query, keys, values, order, lengths, d**-0.5), keys.nbytes + values.nbytes
    else:
        older = _older(kind, order, page, g, d)
        table = torch.arange(b, device=device)[:, None]
        work = partial(paged_decode, query, keys, values, table, lengths, d**-0.5, older=older)
        read = sum(part.nbytes for codes in (older.keys, older.values) for part in (codes.codes, codes.scale, codes.low))
    seconds = _seconds(work, device)
    return _row("paged decode", f"{kind}, {b} rows of {sizes.context} tokens", seconds, read / seconds, "GB/s", read / seconds / roof)


def _older(kind: str, order: Tensor, page: int, g: int, d: int) -> Older:
    """Codes drawn at random: how long reading takes does not hang on them."""
    count, device, turbo = order.numel(), order.device, kind in TURBO
    pools = list[Codes]()
    for channels in (True, False):
        # bytes below 120 are numbers of e4m3
        codes = torch.randint(0, 120, (count, page, g, -(-d * KINDS[kind] // 8)), device=device, dtype=torch.uint8)
        shape = (count, 1, g, d) if channels and not turbo else (count, page, g, 1)
        pools.append(Codes(codes, *(torch.rand(shape, device=device).half() / 100 for _ in range(2))))
    turning = (rotation(d).to(device),) if turbo else ()
    return Older(kind, pools[0], pools[1], order, torch.full((len(order),), order.shape[1], device=device), turning)


def _product(device: torch.device, sizes: Sizes, bits: str, m: int, roof: float) -> dict[str, Cell]:
    """Of copies in turn, together larger than a cache: a decode step finds no weight there either."""
    n, k = sizes.matrix
    x, groups = torch.randn(m, k, device=device, dtype=torch.bfloat16), k // 32 if bits == "int4" else 1
    scales = torch.rand(n, groups, device=device).bfloat16() / k
    works = list[Callable[[], object]]()
    for _ in range(4):
        if bits == "int4":
            packed = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
            works.append(partial(product_int4, x, packed, scales, scales.float()))
        else:
            works.append(partial(product_int8, x, torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8), scales))
    turns = cycle(works)
    seconds = _seconds(lambda: next(turns)(), device)
    read = n * k // 2 + 6 * scales.numel() if bits == "int4" else n * k + scales.nbytes
    case = f"{m} rows times {n} x {k}, {bits}" + (", groups of 32" if bits == "int4" else "")
    return _row("product", case, seconds, read / seconds, "GB/s", read / seconds / roof)


def _step(device: torch.device, sizes: Sizes, rows: int) -> dict[str, Cell]:
    """A whole step of a random decoder behind 100 tokens a row, recorded, beside the same one called kernel by kernel."""
    config = sizes.model
    with torch.device("meta"):
        shapes = {name: part.shape for name, part in Decoder(config).state_dict().items()}
    state = {n: torch.randn(shape, device=device).mul_(0.02).add_("norm" in n).bfloat16() for n, shape in shapes.items()}
    decoder = Decoder.of(config, state)
    ids = torch.zeros(rows, dtype=torch.long, device=device)
    times = list[float]()
    for recorded in (True, False):
        # a block a row for every 16 of the rounds, too
        pages = Pages(config.layers, config.kv_heads, config.head_dim, 64 * rows, torch.bfloat16, device)
        cache, steps = PagedCache.empty(pages, rows), Steps(decoder)
        decoder(decoder.embed(ids[:, None].expand(-1, 100)), torch.arange(100, device=device).expand(rows, -1), cache)
        times.append(_seconds(partial(steps, ids, cache, True) if recorded else partial(_called, decoder, ids, cache), device))
    return _row(
        "step", f"{rows} rows, {config.layers} layers of {config.width}", times[0], rows / times[0], "tok/s", None, times[1] / times[0]
    )


def _called(decoder: Decoder, ids: Tensor, cache: PagedCache) -> Tensor:
    return decoder.logits(decoder(decoder.embed(ids[:, None]), cache.position[:, None], cache)[:, -1])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of rounds, by the GPU's clock where there is one."""
    for _ in range(_WARM):
        work()
    return statistics.median(_timed(work, device))


def _timed(work: Callable[[], object], device: torch.device) -> Sequence[float]:
    if device.type != "cuda":
        marks = [perf_counter()]
        for _ in range(_ROUNDS):
            work()
            marks.append(perf_counter())
        return [after - before for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
