"""Operations of an encoder that a step inside it shortens, as a share of the whole one's, by the lengths that its blocks ran on."""

import math
import statistics
from collections.abc import Sequence

import torch

from mmsdk.apps.train_dora.score import row_flops
from mmsdk.compress import Compression, Method, Step
from mmsdk.models.types import VLM
from mmsdk.tokencomp.methods.dora import Greedy
from mmsdk.vision.encode import Encoder
from mmsdk.vision.prune import Pruner, flops
from mmsdk.vision.shorten import Groups, Shortener
from mmsdk.vision.types import Media, Video
from mmsdk.vision.vit import ViTConfig

__all__ = ["encoder_flops", "merged_flops"]


def encoder_flops(vlm: VLM, compression: Compression, media: Sequence[Media]) -> float:
    """The mean over all frames of these inputs: 1 where nothing works inside the encoder. What is left of each is encoded here again."""
    if not compression.inside_encoder:
        return 1.0
    assert isinstance(vlm.encoder, Encoder), "only such an encoder is shortened here"
    return statistics.mean(share for item in media for share in _frames(vlm.encoder, compression.inside_encoder[0], item))


def merged_flops(config: ViTConfig, n: int, counts: Sequence[int]) -> float:
    """The share of n patches of which each block's attention leaves so many; a multiplication and an addition are two operations."""
    first = int(config.class_token)
    attention = [flops(first + before, config.width, 0) for before in (n, *counts[:-1])]
    mlp = [flops(first + after, config.width, config.hidden) - flops(first + after, config.width, 0) for after in counts]
    embedding = 2 * n * 3 * config.patch**2 * config.width
    return (sum(attention) + sum(mlp) + embedding) / (config.layers * flops(first + n, config.width, config.hidden) + embedding)


def _frames(encoder: Encoder, step: Step[Method], item: Media) -> list[float]:
    """The share of each frame of an input."""
    frames, n = len(item.frames) if isinstance(item, Video) else 1, math.prod(encoder.preprocess.grid(item.size))
    count, config = step.budget(encoder.count(item.size, frames)).count, encoder.backbone.vit.config
    if isinstance(step.method, Shortener):
        return [merged_flops(config, n, plan.counts) for plan in encoder.plan(item.size, frames, step.method, count)]
    assert isinstance(step.method, Pruner), "inside the encoder there is nothing else"
    exact = step.amount != "adaptive"
    (seen,) = encoder.pruned([item], [encoder.prunings(item.size, frames, step.method, count, exact)])
    agent = step.method.agent(encoder.backbone.vit.position[None], config.layers, int(config.class_token), count, exact)
    ran = seen.scores.unflatten(0, (frames, n))
    groups = Groups(torch.ones(frames, n), torch.zeros(frames, n, dtype=torch.int64), int(config.class_token), ran=ran)
    shares: list[float] = row_flops(config, groups, agent.actor if isinstance(agent, Greedy) else None).tolist()
    return shares
