"""Sampling of the next token from logits in one kernel: temperature, top-k, top-p, min-p and the draw, without a sort.

    s = logits * (1 / temperature);  p = softmax(s) over the tokens left so far
    top-k: those not below the k-th highest s (0 is all);   top-p (arXiv 1904.09751): those whose betters hold less than that share;
    min-p (arXiv 2407.01082): those at least that many times as likely as the best;   temperature 0: the best, the lowest of equals
    the draw: the first token, in order of ids, at which the running sum of p passes u, uniform in [0, 1)

Equal scores stand or fall together, so the answer does not depend on an order among equals. Both thresholds are found by bisection on the
scores' bits, which order like the scores once negative ones are flipped: 32 steps each, every one a pass over a row that the cache holds.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, normal

__all__ = ["OP", "sample"]

_BLOCK = 4096


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
    scores = logits.float() * (1 / torch.where(heat == 0, 1, heat))
    ranked = scores.sort(-1, descending=True).values
    count = torch.where(top_k == 0, v, top_k).clamp(max=v).long()[:, None]
    floor = ranked.gather(1, count - 1)
    shares = ranked.masked_fill(ranked < floor, -torch.inf).double().softmax(-1)
    nucleus = (shares.cumsum(-1) - shares < top_p.double()[:, None]).sum(-1, keepdim=True).clamp(min=1)
    floor = torch.where(top_p[:, None] < 1, torch.maximum(floor, ranked.gather(1, nucleus - 1)), floor)
    kept = (scores >= floor) & (scores >= ranked[:, :1] + min_p.float()[:, None].log())
    weights = (scores - ranked[:, :1]).double().exp() * kept
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
        score = tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32) * slope
        higher = score > peaks
        places = tl.where(higher, token, places)
        peaks = tl.where(higher, score, peaks)
    peak = tl.max(peaks, 0)
    best = tl.min(tl.where(peaks == peak, places, v), 0)

    # bits of scores as integers that order like them; kept are those not below the floor
    floor = tl.full([], -2147483648, tl.int32)
    high = tl.full([], 2147483647, tl.int32)
    wanted = tl.load(top_k + row).to(tl.int32)
    if (wanted > 0) & (wanted < v):
        for _ in range(32):
            # the mean, rounded up, of numbers whose sum does not fit
            middle = (floor | high) - ((floor ^ high) >> 1)
            counts = tl.zeros([block], tl.int32)
            for at in range(0, v, block):
                token = at + lane
                score = tl.load(line + token, mask=token < v, other=0.0).to(tl.float32) * slope
                bits = score.to(tl.int32, bitcast=True)
                key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
                counts += ((key >= middle) & (token < v)).to(tl.int32)
            enough = tl.sum(counts, 0) >= wanted
            floor = tl.where(enough, middle, floor)
            high = tl.where(enough, high, middle - 1)

    share = tl.load(top_p + row).to(tl.float32)
    if share < 1:
        masses = tl.zeros([block], tl.float32)
        for at in range(0, v, block):
            token = at + lane
            score = tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32) * slope
            bits = score.to(tl.int32, bitcast=True)
            key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            masses += tl.where(key >= floor, tl.exp(score - peak), 0.0)
        goal = share * tl.sum(masses, 0)
        top = peak.to(tl.int32, bitcast=True)
        high = tl.where(top < 0, top ^ 0x7FFFFFFF, top)
        low = tl.full([], -2147483648, tl.int32)
        for _ in range(32):
            middle = (low & high) + ((low ^ high) >> 1)
            masses = tl.zeros([block], tl.float32)
            for at in range(0, v, block):
                token = at + lane
                score = tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32) * slope
                bits = score.to(tl.int32, bitcast=True)
                key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
                masses += tl.where((key > middle) & (key >= floor), tl.exp(score - peak), 0.0)
            enough = tl.sum(masses, 0) < goal
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, tl.minimum(middle + 1, high))
        floor = tl.maximum(floor, high)

    bar = peak + tl.log(tl.load(min_p + row).to(tl.float32))
    masses = tl.zeros([block], tl.float32)
    for at in range(0, v, block):
        token = at + lane
        score = tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32) * slope
        bits = score.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        masses += tl.where((key >= floor) & (score >= bar), tl.exp(score - peak), 0.0)
    goal = tl.load(uniform + row).to(tl.float32) * tl.sum(masses, 0)
    before = tl.full([], 0.0, tl.float32)
    drawn = tl.full([], 2147483647, tl.int32)
    last = best
    for at in range(0, v, block):
        token = at + lane
        score = tl.load(line + token, mask=token < v, other=float("-inf")).to(tl.float32) * slope
        bits = score.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        weight = tl.where((key >= floor) & (score >= bar), tl.exp(score - peak), 0.0)
        reached = before + tl.cumsum(weight, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((reached > goal) & (weight > 0), token, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
        before += tl.sum(weight, 0)
    drawn = tl.minimum(drawn, last)
    tl.store(out + row, tl.where(greedy, best, drawn).to(tl.int64))


def _case(name: str, v: int, rows: tuple[tuple[float, int, float, float], ...]) -> Case:
    """`rows` are temperature, top-k, top-p and min-p."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
        logits = normal(generator, dtype, len(rows), v) * 3
        logits[:, 1::5] = -torch.inf
        return logits, temperature, top_k, top_p, min_p, torch.rand(len(rows), generator=generator)

    return Case(name, make)


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", 1, ((1.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.5))),
        _case("every setting", 63, ((0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 20, 0.9, 0.02))),
        _case("extremes", 50, ((2.0, 1, 1.0, 0.0), (1.0, 1000, 0.0, 0.0), (1.0, 0, 0.999, 1.0))),
        _case("two blocks", 5000, ((1.5, 0, 1.0, 0.0), (1.0, 50, 0.95, 0.0))),
    ),
    builds=(_case("151936 tokens", 151936, ((1.0, 50, 0.95, 0.05),)),),
)
