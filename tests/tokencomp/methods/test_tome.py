"""ToMe against loops over tokens: matching, merging, sizes and proportional attention, block by block."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.tokencomp.methods.tome import ToMe
from mmsdk.vision.shorten import Inside, Shortening
from mmsdk.vision.taps import Taps
from mmsdk.vision.vit import ViT, ViTConfig


def vit_of(class_token: bool, layers: int = 4) -> ViT:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=24, layers=layers, heads=3, hidden=48, grid=5, class_token=class_token)).eval().requires_grad_(False)
    for block in vit.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.5)
    return vit


def pixels(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, 14 * rows, 14 * columns, generator=torch.Generator().manual_seed(seed))


def slow(vit: ViT, image: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, list[list[int]], Tensor, list[list[int]]]:
    """Tokens, the patches of each, the last block's attention row of token 0, and the patches of those that it speaks of."""
    x = vit.norm_first(vit.embed(image))[0]
    first, heads = vit.cls.shape[0], vit.config.heads
    members: list[list[int]] = [[]] * first + [[i] for i in range(len(x) - first)]
    for block, count in zip(vit.blocks, counts, strict=True):
        query, key, value = block.qkv(block.norm1(x)).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
        size = torch.tensor([max(1, len(patches)) for patches in members])
        weights = (query @ key.transpose(1, 2) / math.sqrt(key.shape[-1]) + size.log()).softmax(-1)
        x = block.add1(x, block.o((weights @ value).transpose(0, 1).flatten(1)))
        row, seen = weights[:, 0], members
        if count < len(x) - first:
            x, members = merged(x, members, key.mean(0), first, count)
        x = block.add2(x, block.mlp(block.norm2(x)[None])[0])
    return vit.norm(x), members, row, seen


def merged(x: Tensor, members: list[list[int]], key: Tensor, first: int, count: int) -> tuple[Tensor, list[list[int]]]:
    a, b = list(range(0, len(x), 2)), list(range(1, len(x), 2))
    links = []
    for i in a:
        cosines = [float(F.cosine_similarity(key[i], key[j], dim=0)) for j in b]
        if i >= first:
            links.append((max(cosines), i, b[cosines.index(max(cosines))]))
    links = sorted(links, key=lambda link: -link[0])[: len(x) - first - count]
    into = {i: j for _, i, j in links}
    order = [[i] for i in a if i not in into] + [[j, *(i for i in into if into[i] == j)] for j in b]
    mean = lambda group: sum(x[i] * max(1, len(members[i])) for i in group) / sum(max(1, len(members[i])) for i in group)  # noqa: E731
    return torch.stack([mean(group) for group in order]), [[p for i in group for p in members[i]] for group in order]


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize(("rows", "columns", "count"), [(4, 4, 8), (3, 5, 4), (5, 5, 2), (1, 7, 6), (2, 3, 6)])
def test_tokens_and_groups_equal_loops(rows: int, columns: int, count: int, class_token: bool) -> None:
    vit, method = vit_of(class_token), ToMe()
    counts = method.plan(rows * columns, count, 4)
    images = torch.cat([pixels(rows, columns, seed) for seed in range(3)])
    taps = Taps(first_rows=(-1,), hidden=(-1,))
    out = vit(images, taps, Shortening(method, counts))
    first = int(class_token)
    for i in range(3):
        tokens, members, row, seen = slow(vit, images[i : i + 1], counts)
        torch.testing.assert_close(out.tokens[i], tokens[first:], rtol=1e-4, atol=1e-4)
        assert out.tokens.shape[1] == count
        for token, patches in enumerate(members):
            assert out.groups.owner[i, patches].tolist() == [token] * len(patches)
        assert out.groups.size[i].tolist() == [max(1, len(patches)) for patches in members]
        for token in range(first, len(members)):
            parts = [j for j, patches in enumerate(seen) if patches and set(patches) <= set(members[token])]
            mean = sum(row[:, j] * len(seen[j]) for j in parts) / len(members[token])
            torch.testing.assert_close(out.taps.first_rows[-1][i, :, token], mean, rtol=1e-4, atol=1e-6)


def test_a_whole_budget_is_the_plain_transformer_bit_for_bit() -> None:
    vit = vit_of(True)
    plan = ToMe().plan(12, 12, 4)
    assert plan == (12,) * 4 and torch.equal(vit(pixels(3, 4)).tokens, vit(pixels(3, 4), shortening=Shortening(ToMe(), plan)).tokens)


def test_blocks_really_run_on_fewer_tokens() -> None:
    vit, seen = vit_of(True, layers=6), []
    for block in vit.blocks:
        block.qkv.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
        block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    vit(pixels(5, 5), shortening=Shortening(ToMe(), ToMe().plan(25, 7, 6)))
    assert seen == [26, 23, 23, 20, 20, 17, 17, 14, 14, 11, 11, 8]


@given(n=st.integers(1, 1024), count=st.integers(1, 1024), depth=st.integers(1, 24))
def test_no_block_merges_more_than_half(n: int, count: int, depth: int) -> None:
    """And a budget is refused only where halving in every block would not do."""
    count = min(n, count)
    if n > count * 2**depth:
        with pytest.raises(BudgetError, match=f"cannot become {count}"):
            ToMe().plan(n, count, depth)
        return
    plan = ToMe().plan(n, count, depth)
    assert plan[-1] == count and all(before - after <= before // 2 for before, after in zip((n, *plan), plan, strict=False))
    if n <= 2 * count:
        # where half a block is no limit the descent is even
        drops = [before - after for before, after in zip((n, *plan), plan, strict=False)]
        assert max(drops) - min(drops) <= 1


def test_of_tokens_that_are_alike_the_odd_one_stays_alone() -> None:
    key = torch.ones(1, 1, 9, 4)
    key[0, 0, 4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    target = ToMe().join(Inside(torch.zeros(1, 9, 4), key, key, torch.ones(1, 9), first=0), 5)
    assert int((target[0] == target[0, 4]).sum()) == 1
