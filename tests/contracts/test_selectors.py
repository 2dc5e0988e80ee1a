"""What every method of sparse attention promises, over every file in its folder: a new one is tested by being there."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk import plugins
from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.types import Everything, Grid, Place, Selection, Selector

METHODS = "mmsdk.diffusion.attention.methods"
NAMES = plugins.available(METHODS)
GRIDS = [Grid(5, 9, 11), Grid(4, 8, 16), Grid(1, 1, 1), Grid(6, 7, 10, before=5), Grid(3, 12, 9, before=70, after=3)]


# as published but for the time that a thousand centroids of a few hundred tokens take
KNOBS = {"svg2": "svg2:query_centroids=20,key_centroids=30,first_iterations=5"}


def method_of(name: str) -> Selector:
    built = plugins.load(METHODS, KNOBS.get(name, name))
    assert isinstance(built, Selector)
    return built


def given(grid: Grid, b: int = 2, h: int = 4, g: int = 4, d: int = 16) -> tuple[Tensor, Tensor, Tensor, Place]:
    """Past the steps and layers that methods leave dense."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(b, heads, grid.tokens, d, generator=draw) for heads in (h, g, g)]
    return *tensors, Place(grid, step=20, steps=50, layer=4, layers=30, projection=torch.randn(h, 24, d, generator=draw))


def same(one: Selection, other: Selection) -> bool:
    pairs = [(one.mask, other.mask)]
    for a, b in ((one.queries, other.queries), (one.keys, other.keys)):
        pairs += [(x, y) for x, y in ((a.order, b.order), (a.starts, b.starts)) if x is not None and y is not None]
        assert (a.size, a.length, a.order is None, a.starts is None) == (b.size, b.length, b.order is None, b.starts is None)
    return all(torch.equal(x, y) for x, y in pairs)


def test_all_methods_are_there() -> None:
    assert {"draft", "nabla", "radial", "ress", "sparge", "sta", "svg", "svg2", "vmoba", "vsa", "xattention"} <= set(NAMES)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_text_reads_all_and_is_read_by_all_and_nothing_is_lost(name: str, grid: Grid, seen: Callable[[Selection], Tensor]) -> None:
    """Lengths that are no multiple of a block among them. Every query reads something, and no output is no number."""
    query, keys, values, place = given(grid)
    choice = method_of(name)(query, keys, values, place)
    assert isinstance(choice, Selection) and (choice.queries.length, choice.keys.length) == (grid.tokens, grid.tokens)
    read = seen(choice)
    text = grid.text(torch.device("cpu"))
    assert read[:, :, text].all() and read[..., text].all() and read.any(-1).all()
    assert choice.density() == pytest.approx(read.double().mean().item())
    out = attend(query, keys, values, choice)
    assert out.shape == query.shape and out.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_output_is_attention_over_what_was_chosen(name: str, seen: Callable[[Selection], Tensor]) -> None:
    query, keys, values, place = given(GRIDS[3])
    choice = method_of(name)(query, keys, values, place)
    assert isinstance(choice, Selection)
    weights = (query.double() @ keys.double().transpose(2, 3) / 4).masked_fill(~seen(choice), -torch.inf).softmax(-1)
    torch.testing.assert_close(attend(query, keys, values, choice).double(), weights @ values.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_it_repeats_changes_nothing_and_takes_each_row_of_the_batch_by_itself(name: str) -> None:
    query, keys, values, place = given(GRIDS[3])
    before = [x.clone() for x in (query, keys, values)]
    method = method_of(name)
    choice, again = method(query, keys, values, place), method(query, keys, values, place)
    alone = method(query[1:], keys[1:], values[1:], place)
    assert isinstance(choice, Selection) and isinstance(again, Selection) and isinstance(alone, Selection)
    assert all(torch.equal(a, b) for a, b in zip((query, keys, values), before, strict=True))
    assert same(choice, again)
    assert torch.equal(choice.mask[1:], alone.mask)


@pytest.mark.parametrize("name", NAMES)
def test_query_heads_that_share_keys_choose_as_if_each_had_its_own(name: str) -> None:
    query, keys, values, place = given(GRIDS[3], g=2)
    method = method_of(name)
    shared, apart = (method(query, *(x.repeat_interleave(n, 1) for x in (keys, values)), place) for n in (1, 2))
    assert isinstance(shared, Selection) and isinstance(apart, Selection)
    assert torch.equal(shared.mask, apart.mask)
    wide = [x.repeat_interleave(2, 1) for x in (keys, values)]
    torch.testing.assert_close(attend(query, keys, values, shared), attend(query, *wide, apart))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_chooses_and_attends_too(name: str) -> None:
    query, keys, values, place = given(GRIDS[0])
    tensors = [x.to(torch.bfloat16) for x in (query, keys, values)]
    choice = method_of(name)(*tensors, place)
    out = attend(*tensors, choice)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_constant_tokens_make_no_trouble(name: str) -> None:
    """All scores equal, all clusters but one empty, all norms zero."""
    grid = GRIDS[0]
    *tensors, place = given(grid)
    for value in (0.0, 1.0):
        query, keys, values = (torch.full_like(x, value) for x in tensors)
        out = attend(query, keys, values, method_of(name)(query, keys, values, place))
        torch.testing.assert_close(out, values)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_keeps_goes_to_the_next_step(name: str) -> None:
    """A method whose memory is handed back gives a selection again, and keeps as much."""
    query, keys, values, place = given(GRIDS[0])
    choice = method_of(name)(query, keys, values, place)
    assert isinstance(choice, Selection)
    following = method_of(name)(query, keys, values, replace(place, step=21, memory=choice.memory))
    assert isinstance(following, Selection)
    assert [x.shape for x in following.memory] == [x.shape for x in choice.memory]


def test_dense_steps_and_layers_are_left_alone() -> None:
    """SVG: the first fifth of the steps, 3 % of the layers. Radial: 12 steps and a layer. VMoBA: until step 12."""
    query, keys, values, place = given(GRIDS[0])
    dense = {
        "svg": [(9, 4, True), (10, 4, False), (20, 0, True), (20, 1, False)],
        "radial": [(11, 4, True), (12, 4, False), (20, 0, True), (20, 1, False)],
        "vmoba": [(11, 0, True), (12, 0, False)],
    }
    for name, rows in dense.items():
        for step, layer, expected in rows:
            choice = method_of(name)(query, keys, values, replace(place, step=step, layer=layer))
            assert isinstance(choice, Everything) is expected, (name, step, layer)
