"""Qwen's vision tower on fewer and fewer tokens: squares of patches merge, as each of them is to become one token.

A merged patch turns by the mean of the places of what it is made of, lies in the window where that mean is, and counts as many times as it
has patches. This is ours: token merging was published for transformers without rotary positions and windows (arXiv 2210.09461).

Letters: b steps of one grid, n patches, s tokens of the stream, m tokens left, c numbers of a patch, d width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mmsdk.vision.merged import Merged
from mmsdk.vision.shorten import Groups, Inside, Shortening
from mmsdk.vision.taps import attention_mean
from mmsdk.vision.tower import Block, Merger, Tower

__all__ = ["merged"]


def merged(tower: Tower, patches: Float[Tensor, "b n c"], grid: tuple[int, int], plan: Shortening) -> list[Merged]:
    """What is left of each step. Saliency and keys are as in `mmsdk.vision.tower.TowerOutput`."""
    config, (area,) = tower.config, plan.area
    order = area.order(grid, patches.device)
    x, groups = Groups.begin(tower.embed(patches, grid), 0, area, order)
    places = torch.stack((order // grid[1], order % grid[1]), dim=-1).float().expand(len(x), -1, -1)
    deep, score = list[tuple[Tensor, Groups]](), (x[..., :0], x[..., :0], groups)
    for number, block in enumerate(tower.blocks):
        assert isinstance(block, Block)
        before, count = groups, plan.counts[number] if plan.counts else groups.count
        native = block.native(x)
        query, key, value = block.inside(x, native)
        turned_query, turned = tower.angles(*places.unbind(-1))(query, key)
        windowed = config.window and number not in config.full
        bias = _bias(before, places, config.window if windowed else 0)
        x = block.add(x, F.scaled_dot_product_attention(turned_query, turned, value, bias.to(x.dtype)), native)
        if number == config.scored:
            received = attention_mean(turned_query, turned, before.bias).mean(dim=1)
            score = received[..., None], key.transpose(1, 2).flatten(2), before
        if count < before.count:
            groups = before.joined(before.target(plan.by, Inside(x, query, key, before.size, 0), count), count)
            x, places = before.carry(x, groups), before.carry(places, groups)
        x = block.feed(x, native)
        if number in config.deep:
            merger = tower.deep[config.deep.index(number)]
            assert isinstance(merger, Merger)
            deep.append((merger.tokens(x.unflatten(1, (-1, groups.each))), groups.tokens(area, grid)))
    final, (received, keys, seen) = groups.tokens(area, grid), score
    means = [seen.carry(one, groups).unflatten(1, (-1, groups.each)).mean(dim=2) for one in (received, keys)]
    tokens = tower.merger.tokens(x.unflatten(1, (-1, groups.each)))
    carried = [of.carry(layer, final) for layer, of in deep]
    return Merged.of(tokens, means[0][..., 0], means[1], final, area.grid[1], carried)


def _bias(groups: Groups, places: Float[Tensor, "b s 2"], window: int) -> Float[Tensor, "b 1 _ s"]:
    """What is added to scores: the logarithm of sizes, and nothing may be seen of other windows."""
    sizes = groups.size.log()[:, None, None]
    if not window:
        return sizes
    within = (places / window).floor()
    same = (within[:, :, None] == within[:, None]).all(dim=-1)
    return sizes.masked_fill(~same[:, None], -torch.inf)
