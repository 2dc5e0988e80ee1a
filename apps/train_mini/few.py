"""Stage 2: the language model learns to read few tokens, of a projector that learns no more.

Stage 1 shows 64 tokens of a picture or more. Here most steps show what compressors leave of it, a handful up to 96, of a clip up to 193:
chosen by chance, by things, evenly or far apart, means of clusters, or what braco's coder makes of them. The other steps are those of
stage 1, so that what was learnt of many tokens stays. Methods are given the projector's embeddings, as in the pipeline; these stay what
they were, and with them whatever was calibrated or trained on them.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.descent import cosine, descend
from mmsdk.apps.interrupts import Stop
from mmsdk.apps.train_mini.features import Shard
from mmsdk.apps.train_mini.finetune import Adapters, Recipe, forward, layer_forward, loss_of
from mmsdk.apps.train_mini.loop import CLIPS, STILLS, Mixture, batch_of
from mmsdk.apps.train_mini.packing import Batch, pack, subset
from mmsdk.decoder.transformer import Decoder
from mmsdk.models.mini.projector import Projector
from mmsdk.models.types import Codec
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.braco import Braco
from mmsdk.tokencomp.methods.divprune import DivPrune
from mmsdk.tokencomp.methods.random import Random
from mmsdk.tokencomp.methods.simplecluster import SimpleCluster
from mmsdk.tokencomp.methods.uniform import Uniform
from mmsdk.tokencomp.types import Compressor

__all__ = ["FewRecipe", "batch_of_few", "read_few", "shorten"]


@dataclass(frozen=True, slots=True)
class FewRecipe:
    """The knobs of stage 2; the same values and seed give the same batches. `again` of the steps are those of stage 1.

    What is kept lies at `toward` on the way from where the stage began to where it ended (WiSE-FT, arXiv 2109.01903): a little of what is
    learnt of few tokens for what is known of many.
    """

    steps: int = 700
    again: float = 0.25
    lr: float = 3e-4
    warmup: int = 20
    toward: float = 0.8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Tier:
    """Rows of `length` tokens, `least` to `most` of them visual: as many of a picture, twice as many of a clip."""

    share: float
    rows: int
    length: int
    least: int
    most: int


# Two static shapes. Counts are even on a logarithmic scale.
TIERS = (Tier(0.6, 6, 176, 3, 24), Tier(0.4, 4, 304, 24, 96))
WAYS = {"things": 0.2, "random": 0.15, "uniform": 0.1, "divprune": 0.1, "simplecluster": 0.3, "braco": 0.15}
_CODED = {"image": (11, 4), "clip": (4,)}


def shorten(projector: Projector, shard: Shard, i: int, count: int, way: str, rng: np.random.Generator) -> Float[Tensor, "k e"]:
    """The embeddings of sample i's tokens, `count` of them, in reading order; braco's coder has its own counts."""
    whole = shard.tokens(i)
    if way == "things" and count >= whole.grid[0]:
        return projector.connect([shard.tokens(i, subset(shard, i, count, rng))])[0]
    method: Compressor
    match way:
        case "braco":
            count, method = int(rng.choice(_CODED["clip" if whole.grid[0] > 1 else "image"])), Braco(coder="mini")
        case "simplecluster":
            method = SimpleCluster()
        case "divprune":
            method = DivPrune()
        case "uniform":
            method = Uniform()
        case _:
            # also in the place of "things", of a clip with more frames than tokens
            method = Random(seed=int(rng.integers(2**31)))
    embedded = replace(whole, features=projector.connect([whole])[0].float())
    (left,) = method([embedded], [Budget(min(count, len(whole)))])
    return left.tokens.features


@torch.no_grad()
def batch_of_few(
    mixture: Mixture, projector: Projector, recipe: FewRecipe, step: int, tokenizer: Codec, cache: dict[str, list[int]]
) -> Batch:
    """The batch of a step, of which `features` are embeddings: a pure function of the seed and the step."""
    rng = np.random.default_rng((recipe.seed, 13, step))
    tier = TIERS[int(rng.choice(len(TIERS), p=[tier.share for tier in TIERS]))]
    shard, rows = mixture.draw(rng, tier.rows, STILLS + CLIPS)
    seen = []
    for i in rows:
        count = math.exp(rng.uniform(math.log(tier.least), math.log(tier.most + 1)))
        doubled = 1 if shard.samples[i].clip is None else 2
        seen.append(shorten(projector, shard, i, int(doubled * count), str(rng.choice(list(WAYS), p=list(WAYS.values()))), rng))
    return pack(shard, rows, tier.length, [len(one) for one in seen], tokenizer, rng, cache, embedded=seen)


def read_few(
    decoder: Decoder, projector: Projector, adapters: Adapters, shards: Sequence[Shard], tokenizer: Codec, many: Recipe,
    recipe: FewRecipe, folder: Path, layer: Callable[..., Tensor] = layer_forward,
    until: int | None = None,
) -> bool:  # fmt: skip
    """Train the adapters in place, from the last checkpoint in `folder` to the end; returns whether it came there.

    Raises InputError for a checkpoint of another recipe, or of a stage that began elsewhere. `many` is the recipe of
    stage 1. The first Ctrl-C ends it after the step that is being made, `until` at that step, the checkpoint saved.
    """
    mixture, cache = Mixture(shards), dict[str, list[int]]()
    last = recipe.steps if until is None else until
    began = [parameter.detach().clone() for parameter in adapters.parameters()]
    origin = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in began)).hexdigest()[:16]
    dtype, device = decoder.embedding.weight.dtype, decoder.embedding.weight.device
    right: float | None = None

    def loss(step: int) -> Tensor:
        nonlocal right
        rng = np.random.default_rng((recipe.seed, 17, step))
        if rng.random() < recipe.again:
            # as many with every token as with a part of them; past the scenes alone that it began with
            at = many.steps - 1 if rng.random() < 0.5 else many.scene_steps
            batch = batch_of(mixture, replace(many, seed=recipe.seed + 1000 + step), at, tokenizer, cache).to(device)
            hidden = forward(decoder, projector, adapters.cast(dtype), batch, layer)
        else:
            batch = batch_of_few(mixture, projector, recipe, step, tokenizer, cache).to(device)
            hidden = forward(decoder, lambda features, places: features, adapters.cast(dtype), batch, layer)
        mean, hits = loss_of(decoder, hidden, batch)
        now = float(hits.float().mean())
        right = now if right is None else 0.97 * right + 0.03 * now
        return mean

    optimiser = torch.optim.AdamW(adapters.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    steps = descend(
        adapters, optimiser, folder / "few.safetensors", f"{recipe} from {origin}", last,
        lambda step: recipe.lr * cosine(step, recipe.steps, 1.0, recipe.warmup, least=0.03), loss,
    )  # fmt: skip
    projector.requires_grad_(False)
    # no step is made where a checkpoint stands there already
    done, lost = last, 0.0
    with tqdm(total=recipe.steps, desc="few tokens", unit="step", mininterval=10) as bar, Stop() as stopping, closing(steps):
        for done, now in steps:
            lost = 0.97 * lost + 0.03 * now if lost else now
            bar.update(done - bar.n)
            bar.set_postfix(loss=f"{lost:.3f}", right=f"{right:.3f}", refresh=False)
            if stopping.asked:
                break
    if done < recipe.steps:
        return False
    with torch.no_grad():
        for parameter, before in zip(adapters.parameters(), began, strict=True):
            parameter.copy_(before.lerp(parameter, recipe.toward))
    return True
