"""Sampling of the next token from logits in one kernel: temperature, top-k, top-p, min-p and the draw, without a sort.

    s = (logits - max) * (1 / temperature);  p = softmax(s) over the tokens left so far
    top-k: the k highest s (0 is all);   top-p (arXiv 1904.09751): those, from the highest on, before whom less than that share lies;
    min-p (arXiv 2407.01082): those at least that many times as likely as the best;   temperature 0: the best
    the draw: the first token, in order of ids, at which the running sum of p passes u, uniform in [0, 1)

Of equal scores the lower ids come first, and the best always stays: `mmsdk.generate.sampling` leaves the same tokens. Both thresholds are
found by bisection on the scores' bits, which order like the scores once negative ones are flipped: 32 steps each, every one a pass over a
row that the cache holds; one pass more finds how many of those at the threshold stay.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "sample"]

_BLOCK = 2048


def sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, " b"],
    top_k: Int[Tensor, " b"],
    top_p: Float[Tensor, " b"],
    min_p: Float[Tensor, " b"],
    uniform: Float[Tensor, " b"],
) -> Int[Tensor, " b"]:
    """The next token of every row, by its own settings and its own random number, whatever rows stand beside it.

    Draw `uniform` from a torch.Generator per request. At least one logit of a row must be a number; -inf is never drawn.
    """
    arguments = logits, temperature, top_k, top_p, min_p, uniform
    return (_plan(*arguments).run() if launchable(logits) else _reference(*arguments))[0]


def _reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Result:
    v = logits.shape[1]
    heat, goal = temperature.float()[:, None], uniform.double()[:, None]
    wide = logits.float()
    scores = (wide - wide.amax(-1, keepdim=True)) * (1 / torch.where(heat == 0, 1, heat))
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(v, device=logits.device)
    kept = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    shares = ranked.masked_fill(~kept, -torch.inf).double().softmax(-1)
    kept &= (shares.cumsum(-1) - shares < top_p.double()[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    left = torch.zeros_like(kept).scatter(-1, order, kept) & (scores >= min_p.float()[:, None].log())
    weights = scores.double().exp() * left
    sums = weights.cumsum(-1)
    drawn = (sums <= goal * sums[:, -1:]).sum(-1)
    # rounding may leave the last sum at the goal: then it is the last token that is left
    last = v - 1 - (weights > 0).flip(-1).long().argmax(-1)
    return (torch.where(temperature == 0, scores.argmax(-1), torch.minimum(drawn, last)),)


def _plan(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Plan:
    b, v = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty(b, dtype=torch.int64, device=logits.device)
    arguments: dict[str, Tensor | int | float] = {
        "logits": logits,
        "temperature": temperature.contiguous(),
        "top_k": top_k.contiguous(),
        "top_p": top_p.contiguous(),
        "min_p": min_p.contiguous(),
        "uniform": uniform.contiguous(),
        "out": out,
        "logits_row": logits.stride(0),
        "v": v,
    }
    block = min(power(v), _BLOCK)
    return Plan((out,), (Launch(_kernel, (b,), arguments, {"block": block}, warps=min(max(block // 512, 1), 8)),))


@jit
def _kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    out: tl.tensor,
    logits_row: tl.tensor,
    v: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * logits_row
    lane = tl.arange(0, block)
    heat = tl.load(temperature + row).to(tl.float32)
    greedy = heat == 0
    slope = tl.div_rn(1.0, tl.where(greedy, 1.0, heat))

    peaks = tl.full([block], float("-inf"), tl.float32)
    places = tl.zeros([block], tl.int32)
    for at in range(0, v, block):
        token = at + lane
        score = tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32)
        higher = score > peaks
        places = tl.where(higher, token, places)
        peaks = tl.where(higher, score, peaks)
    peak = tl.max(peaks, 0)
    best = tl.min(tl.where(peaks == peak, places, v), 0)

    # bits of scores as integers that order like them; kept are those above the floor, and of those at it the ids up to `cut`
    floor = tl.full([], -2147483648, tl.int32)
    cut = tl.full([], 2147483647, tl.int32)
    wanted = tl.where(greedy, 0, tl.load(top_k + row).to(tl.int32))
    # of a row that sets no limit no round is made
    limited = (wanted > 0) & (wanted < v)
    high = tl.full([], 2147483647, tl.int32)
    above = tl.full([], 0, tl.int32)
    for _ in range(tl.where(limited, 32, 0)):
        # the mean, rounded up, of numbers whose sum does not fit
        middle = (floor | high) - ((floor ^ high) >> 1)
        counts = tl.zeros([block], tl.int32)
        for at in range(0, v, block):
            token = at + lane
            key = _key(_score(line, token, v, peak, slope))
            counts += ((key >= middle) & (token < v)).to(tl.int32)
        count = tl.sum(counts, 0)
        enough = count >= wanted
        floor = tl.where(enough, middle, floor)
        high = tl.where(enough, high, middle - 1)
        # in the end those of the floor's successor
        above = tl.where(enough, above, count)
    cut = tl.where(limited, _last_of(line, v, peak, slope, floor, wanted - above, block), cut)

    share = tl.where(greedy, 1.0, tl.load(top_p + row).to(tl.float32))
    masses = tl.zeros([block], tl.float32)
    for at in range(0, v, block):
        token = at + lane
        score = _score(line, token, v, peak, slope)
        key = _key(score)
        masses += tl.where((key > floor) | ((key == floor) & (token <= cut)), tl.exp(score), 0.0)
    goal = share * tl.sum(masses, 0)
    # the best has the score 0, whose bits are 0
    high = tl.full([], 0, tl.int32)
    held = tl.full([], 0.0, tl.float32)
    low = tl.full([], -2147483648, tl.int32)
    for _ in range(tl.where(share < 1, 32, 0)):
        middle = (low & high) + ((low ^ high) >> 1)
        masses = tl.zeros([block], tl.float32)
        for at in range(0, v, block):
            token = at + lane
            score = _score(line, token, v, peak, slope)
            key = _key(score)
            inside = (key > middle) & ((key > floor) | ((key == floor) & (token <= cut)))
            masses += tl.where(inside, tl.exp(score), 0.0)
        mass = tl.sum(masses, 0)
        enough = mass < goal
        high = tl.where(enough, middle, high)
        held = tl.where(enough, mass, held)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    # those at the threshold weigh all alike, and stay as long as less than the share lies before them
    each = tl.exp(tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True))
    left = tl.minimum(tl.ceil((goal - held) / tl.where(each > 0, each, 1.0)), 1.0 * v)
    stay = _last_of(line, v, peak, slope, high, tl.maximum(left, 1.0).to(tl.int32), block)
    high = tl.where(share < 1, high, -2147483648)
    cut = tl.where(high > floor, stay, tl.where(high == floor, tl.minimum(stay, cut), cut))
    floor = tl.maximum(floor, high)

    bar = tl.log(tl.load(min_p + row).to(tl.float32))
    masses = tl.zeros([block], tl.float32)
    for at in range(0, v, block):
        token = at + lane
        score = _score(line, token, v, peak, slope)
        key = _key(score)
        masses += tl.where(((key > floor) | ((key == floor) & (token <= cut))) & (score >= bar), tl.exp(score), 0.0)
    goal = tl.load(uniform + row).to(tl.float32) * tl.sum(masses, 0)
    before = tl.full([], 0.0, tl.float32)
    drawn = tl.full([], 2147483647, tl.int32)
    last = best
    for at in range(0, v, block):
        token = at + lane
        score = _score(line, token, v, peak, slope)
        key = _key(score)
        weight = tl.where(((key > floor) | ((key == floor) & (token <= cut))) & (score >= bar), tl.exp(score), 0.0)
        reached = before + tl.cumsum(weight, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((reached > goal) & (weight > 0), token, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
        before += tl.sum(weight, 0)
    drawn = tl.minimum(drawn, last)
    tl.store(out + row, tl.where(greedy, best, drawn).to(tl.int64))


@jit
def _score(line: tl.tensor, token: tl.tensor, v: tl.tensor, peak: tl.tensor, slope: tl.tensor) -> tl.tensor:
    """Scores of tokens below the best, whose own is 0; -inf behind the last token."""
    return (tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32) - peak) * slope


@jit
def _key(score: tl.tensor) -> tl.tensor:
    """Integers that order like scores."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _last_of(
    line: tl.tensor, v: tl.tensor, peak: tl.tensor, slope: tl.tensor, floor: tl.tensor, count: tl.tensor, block: tl.constexpr
) -> tl.tensor:
    """The id of the last of the first so many tokens whose score is this one."""
    lane = tl.arange(0, block)
    before = tl.full([], 0, tl.int32)
    found = tl.full([], -1, tl.int32)
    for at in range(0, v, block):
        token = at + lane
        same = (_key(_score(line, token, v, peak, slope)) == floor) & (token < v)
        places = before + tl.cumsum(same.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(same & (places <= count), token, -1), 0))
        before += tl.sum(same.to(tl.int32), 0)
    return found


def _case(name: str, v: int, rows: tuple[tuple[float, int, float, float], ...], equal: bool = False) -> Case:
    """`rows` are temperature, top-k, top-p and min-p; with `equal` many scores are the same."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
        logits = normal(generator, dtype, len(rows), v) * 3
        logits[:, 1::5] = -torch.inf
        if equal:
            logits = (logits / 2).round()
        return logits, temperature, top_k, top_p, min_p, torch.rand(len(rows), generator=generator)

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: rows that 32-bit offsets cannot reach."""
    settings = (torch.full((2,), value) for value in (0.8, 5, 0.9, 0.01))
    return distant(normal(generator, dtype, 2, 30)), *settings, torch.rand(2, generator=generator)


_EQUAL = (*((1.0, k, p, 0.0) for k in (0, 1, 7, 20) for p in (1.0, 0.3, 0.7)), (0.0, 3, 0.5, 0.0))

OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", 1, ((1.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.5))),
        _case("every setting", 63, ((0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 20, 0.9, 0.02))),
        _case("extremes", 50, ((2.0, 1, 1.0, 0.0), (1.0, 1000, 0.0, 0.0), (1.0, 0, 0.999, 1.0))),
        _case("equal scores", 40, _EQUAL, equal=True),
        _case("the coldest and the hottest", 63, ((1e-38, 0, 1.0, 0.0), (1e-38, 5, 0.9, 0.1), (1e30, 5, 0.9, 0.1))),
        Case("offsets beyond 2**31", _distant),
        _case("two blocks", 5000, ((1.5, 0, 1.0, 0.0), (1.0, 50, 0.95, 0.0))),
    ),
    builds=(_case("151936 tokens", 151936, ((1.0, 50, 0.95, 0.05),)),),
)
