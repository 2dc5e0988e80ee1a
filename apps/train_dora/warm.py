"""Where the which begins: with the patches on which the whole transformer's final states, read by the probe, show a name.

This is privileged knowledge, of which the deployed actor sees nothing: it learns to foretell it from the states of the eligible blocks.
Reinforcement alone has one number for a hundred choices of tokens, and goes on from here. Ours: nothing of the kind is published.

Letters: b pictures, m patch tokens.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.train_dora.pool import Pool
from mmsdk.tokencomp.actor import Actor, Brief
from mmsdk.vision.packed import Rows, received
from mmsdk.vision.prune import View
from mmsdk.vision.vit import Block, ViT

__all__ = ["foretell", "wanted"]

SPREAD = 3.0
"""The deviation of logits within a picture: drawn tokens are then mostly those that would be taken."""


def wanted(evidence: Float[Tensor, "b m"]) -> Float[Tensor, "b m"]:
    """The logits that are learned: the evidence of each patch, in units of its picture's deviation."""
    centred = evidence - evidence.mean(dim=1, keepdim=True)
    return SPREAD * centred / evidence.std(dim=1, keepdim=True).clamp_min(1e-3)


def foretell(vit: ViT, actor: Actor, pool: Pool, seed: int, passes: int = 2, batch: int = 8, rate: float = 2e-3) -> float:
    """Teach the actor's which in place, over the pool `passes` times; gives the last mean squared error over the wanted variance."""
    optimiser, generator, error = torch.optim.Adam(actor.ranking(), lr=rate), torch.Generator().manual_seed(seed), 1.0
    order = torch.cat([torch.randperm(len(pool), generator=generator) for _ in range(passes)])
    for chosen in tqdm(order.split(batch), desc="what to keep", unit="batch", mininterval=5):
        part = pool.only(chosen.tolist())
        goal, losses = wanted(part.evidence), list[Tensor]()
        for view in _views(vit, actor.config.blocks, part):
            brief = Brief.of(view)
            with torch.no_grad():
                context = actor(brief)[2]
            keep = actor.which(brief, context).unflatten(0, (len(part), -1))[:, view.rows.first :]
            losses.append(F.mse_loss(keep - keep.mean(dim=1, keepdim=True), goal))
        loss = torch.stack(losses).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        error = 0.9 * error + 0.1 * float(loss.detach()) / SPREAD**2
    return error


@torch.no_grad()
def _views(vit: ViT, blocks: tuple[int, ...], pool: Pool) -> list[View]:
    """What the actor sees before each eligible block where nothing is removed."""
    (b, full, _), views = pool.stream.shape, list[View]()
    x, looks, rows = pool.stream.flatten(0, 1), pool.received.flatten(), Rows.of(b, full, vit.cls.shape[0], pool.stream.device)
    for i, block in enumerate(vit.blocks):
        if not blocks[0] <= i <= blocks[-1]:
            continue
        assert isinstance(block, Block)
        if i in blocks:
            views.append(View(i, len(vit.blocks), x, looks, rows))
        x, query, key = block.attend_rows(x, rows)
        x = block.feed(x)
        if i + 1 in blocks:
            looks = received(query, key, rows)
    return views
