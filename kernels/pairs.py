"""Products of vectors with vectors: what pair similarity, seeding, determinants and assignment share.

Between vectors of length 1 they are cosines, and a zero vector has cosine 0 to everything. Sums are float32, in whole float32 products too.

A method that chooses one token after the other wants one row of the matrix of all pairs at each step. Where the matrix is small and many
of its rows are wanted it is computed at once, as one large product; else each row when its turn comes, so that no matrix of all tokens by
all tokens is held of a long clip.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels._triton import accumulable, jit, tl
from mmsdk.kernels.case import Launch

__all__ = ["ENTRIES", "all_pairs", "earliest", "few", "paired", "product_rows", "row_of", "side_by_side", "solid"]

# Entries of a matrix over pairs, or of a slice of it, that may exist at one time: 8 MiB in float32.
ENTRIES = 2**21

# Rows and columns of a tile of products, and the channels of a step towards it, for four warps; in float32 without tensor cores.
_TILE, _TILE32 = (64, 64, 32), (64, 32, 16)


def few(b: int, n: int) -> bool:
    """Whether the matrices of n tokens by n tokens of b inputs are small enough to be held whole, all at one time."""
    return b * n * n <= ENTRIES


def side_by_side(b: int, n: int, count: int) -> int:
    """How many of b inputs `product_rows` is to be asked about at one time: all, or as many as whose matrices are small enough together.

    Reading all vectors of a clip again for each row takes several times as long as one large product does, so that clips whose matrices
    can be held one after the other take turns.
    """
    return min(b, ENTRIES // (n * n)) if _at_once(1, n, count) else b


def product_rows(z: Float[Tensor, "b n d"], count: int) -> Callable[[Int[Tensor, "b 1"]], Float[Tensor, "b n"]]:
    """In torch: a function from one token of each input to its products with all tokens, made to be called `count` times."""
    b, n, d = z.shape
    starts = torch.arange(b, device=z.device)[:, None] * n
    if _at_once(b, n, count):
        whole = (z @ z.transpose(1, 2)).view(b * n, n)
        return lambda token: whole.index_select(0, (token + starts).view(b))
    flat = z.reshape(b * n, d)
    return lambda token: torch.bmm(z, flat.index_select(0, (token + starts).view(b))[..., None]).view(b, n)


def all_pairs(z: Float[Tensor, "b n d"], count: int) -> tuple[Tensor, Launch] | None:
    """For a kernel that wants `count` rows: where all pairs go, and their launch; none where each row is to be computed in its turn."""
    b, n, _ = z.shape
    return paired(z, z) if _at_once(b, n, count) else None


def _at_once(b: int, n: int, count: int) -> bool:
    return few(b, n) and 16 * count >= n


def solid(x: Tensor) -> Tensor:
    """The same tensor, its channels side by side in memory, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def paired(
    x: Float[Tensor, "b n d"], y: Float[Tensor, "b m d"], room: Float[Tensor, " entries"] | None = None
) -> tuple[Float[Tensor, "b n m"], Launch]:
    """Where the products of each of x with each of y go, float32, in `room` if it is given, and their launch. Both are `solid`."""
    b, n, d = x.shape
    m = y.shape[1]
    room = torch.empty(b * n * m, dtype=torch.float32, device=x.device) if room is None else room
    out = room[: b * n * m].view(b, n, m)
    rows, columns, depth = _TILE32 if x.dtype == torch.float32 else _TILE
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "y": y,
        "out": out,
        "x_row": x.stride(0),
        "x_token": x.stride(1),
        "y_row": y.stride(0),
        "y_token": y.stride(1),
        "n": n,
        "m": m,
        "d": d,
    }
    constants = {"rows": rows, "columns": columns, "depth": depth, "inner": accumulable(x.dtype)}
    return out, Launch(_kernel, (b * -(-n // rows), -(-m // columns)), arguments, constants)


@jit
def _kernel(
    x: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_token: tl.tensor,
    y_row: tl.tensor,
    y_token: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    d: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    inner: tl.constexpr,
) -> None:
    tiles = (n + rows - 1) // rows
    row = (tl.program_id(0) // tiles).to(tl.int64)
    left = tl.program_id(0) % tiles * rows + tl.arange(0, rows)
    right = tl.program_id(1) * columns + tl.arange(0, columns)
    x_at = row * x_row + left.to(tl.int64) * x_token
    y_at = row * y_row + right.to(tl.int64) * y_token
    sums = tl.zeros([rows, columns], tl.float32)
    for at in range(0, d, depth):
        channel = at + tl.arange(0, depth)
        inside = channel < d
        x_part = tl.load(x + x_at[:, None] + channel[None, :], mask=(left < n)[:, None] & inside[None, :], other=0.0).to(inner)
        y_part = tl.load(y + y_at[None, :] + channel[:, None], mask=(right < m)[None, :] & inside[:, None], other=0.0).to(inner)
        sums += tl.dot(x_part, y_part, input_precision="ieee")
    at = (row * n + left)[:, None] * m + right[None, :]
    tl.store(out + at, sums, mask=(left < n)[:, None] & (right < m)[None, :])


@jit
def row_of(
    source: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    stride: tl.tensor,
    block: tl.constexpr,
    channels: tl.constexpr,
) -> tl.tensor:
    """Within a kernel: the products of one token with the tokens at `place`, computed from vectors."""
    far = place.to(tl.int64) * stride
    sums = tl.zeros([block, channels], tl.float32)
    for at in range(0, d, channels):
        channel = at + tl.arange(0, channels)
        inside = channel < d
        own = tl.load(source + token * stride + channel, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(source + far[:, None] + channel[None, :], mask=(place < n)[:, None] & inside[None, :], other=0.0)
        sums += part.to(tl.float32) * own[None, :]
    return tl.sum(sums, 1)


@jit
def earliest(values: tl.tensor, n: tl.tensor, tie: tl.constexpr, scan: tl.constexpr) -> tl.tensor:
    """Within a kernel: the earliest of n numbers within `tie` of the least, and the first where that is no number."""
    lows = tl.full([scan], float("inf"), tl.float32)
    for at in range(0, n, scan):
        place = at + tl.arange(0, scan)
        lows = tl.minimum(lows, tl.load(values + place, mask=place < n, other=float("inf")))
    bar = tl.min(lows, 0) + tie
    hits = tl.full([scan], 2147483647, tl.int32)
    for at in range(0, n, scan):
        place = at + tl.arange(0, scan)
        low = tl.load(values + place, mask=place < n, other=float("inf"))
        hits = tl.minimum(hits, tl.where((low <= bar) & (place < n), place, 2147483647))
    hit = tl.min(hits, 0)
    return tl.where(hit < n, hit, 0).to(tl.int64)
