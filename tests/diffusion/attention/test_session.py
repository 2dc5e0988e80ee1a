"""A session keeps state by layer and branch, begins anew when told or when shapes change, and refuses what it cannot honour."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.methods.nabla import Nabla
from mmsdk.diffusion.attention.methods.svg2 import Svg2
from mmsdk.diffusion.attention.session import Session
from mmsdk.diffusion.attention.types import Blocks, Choice, Grid, Place, Selection
from mmsdk.errors import InputError

GRID = Grid(2, 8, 8)


@dataclass(frozen=True, slots=True)
class Counting:
    """Reads everything, and remembers how often it was asked."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, place: Place) -> Choice:
        count = place.memory[0] + 1 if place.memory else torch.ones(1)
        blocks = Blocks(64, query.shape[2])
        mask = torch.ones(*query.shape[:2], blocks.count, blocks.count, dtype=torch.bool)
        # the count is told through the output
        return Selection(mask, blocks, blocks, count * torch.ones_like(query), (count,))


def told(session: Session, step: int, layer: int = 0, branch: str = "", b: int = 1) -> float:
    x = torch.zeros(b, 2, GRID.tokens, 16)
    return float(session(x, x, x, Place(GRID, step=step, layer=layer), branch)[0, 0, 0, 0])


def test_state_belongs_to_a_layer_and_a_branch() -> None:
    session = Session(Counting())
    assert [told(session, 0), told(session, 0, branch="uncond"), told(session, 0, layer=1)] == [1, 1, 1]
    assert [told(session, 1), told(session, 1, branch="uncond"), told(session, 1, layer=1), told(session, 2)] == [2, 2, 2, 3]


def test_another_generation_another_shape_and_reset_begin_anew() -> None:
    session = Session(Counting())
    assert [told(session, 0), told(session, 1), told(session, 0), told(session, 1)] == [1, 2, 1, 2]
    assert [told(session, 2, b=2), told(session, 3, b=2), told(session, 4)] == [1, 2, 1]
    session.reset()
    assert told(session, 5) == 1


def test_two_requests_taken_in_turn_equal_one_after_the_other() -> None:
    draws = [[torch.randn(1, 2, GRID.tokens, 16, generator=torch.Generator().manual_seed(10 * r + n)) for n in range(3)] for r in range(2)]
    method = Svg2(5, 6, first_iterations=3)
    alone = []
    for draw in draws:
        session = Session(method)
        alone.append([session(*draw, Place(GRID, step=step)) for step in range(2)])
    sessions = [Session(method) for _ in draws]
    turns = [[session(*draw, Place(GRID, step=step)) for session, draw in zip(sessions, draws, strict=True)] for step in range(2)]
    assert all(torch.equal(alone[request][step], turns[step][request]) for request in range(2) for step in range(2))


def test_ka_05_a_mask_that_is_true_everywhere_is_none_and_padding_is_refused() -> None:
    query, keys, values = (torch.randn(1, 2, GRID.tokens, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    plain = Session(Nabla())(query, keys, values, Place(GRID))
    full = torch.ones(1, GRID.tokens, dtype=torch.bool)
    assert torch.equal(Session(Nabla())(query, keys, values, Place(GRID), mask=full), plain)
    assert torch.equal(Session(Nabla())(query, keys, values, Place(GRID), mask=full[:, None, None]), plain)
    full[0, -1] = False
    with pytest.raises(InputError, match="takes no padding"):
        Session(Nabla())(query, keys, values, Place(GRID), mask=full)


def test_a_grid_of_other_tokens_is_refused() -> None:
    x = torch.zeros(1, 2, 100, 16)
    with pytest.raises(InputError, match="has 128 tokens; there are 100"):
        Session(Nabla())(x, x, x, Place(GRID))


def test_keeping_all_is_dense_attention_step_after_step() -> None:
    session = Session(Nabla(mass=1.0))
    place = Place(GRID)
    for step in range(3):
        query, keys, values = (torch.randn(1, 2, GRID.tokens, 16, generator=torch.Generator().manual_seed(n + step)) for n in range(3))
        out = session(query, keys, values, replace(place, step=step))
        torch.testing.assert_close(out, F.scaled_dot_product_attention(query, keys, values), rtol=1e-5, atol=1e-5)
