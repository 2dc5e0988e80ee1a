"""What compression costs and saves: the stages of a pipeline timed over a batch, the bytes of its cache, and what fidelity is lost."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from mmsdk.answer import Timings
from mmsdk.apps.compression.answers import sources
from mmsdk.apps.compression.asked import Asked
from mmsdk.apps.train_mini.clips import clip
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.compress import Compression
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kv.types import KVCache
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt
from mmsdk.seeing import asked as words
from mmsdk.stages import Clock, Question, device_of, prepare
from mmsdk.tokencomp.fidelity import fidelity
from mmsdk.tokencomp.types import Compressor, Thinner
from mmsdk.vision.types import Video

__all__ = ["Cost", "cost", "long_clips", "lost", "paired", "run"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of each stage of one batch, bytes of keys and values per question after prefill, the share of tokens kept, and the
    milliseconds of choosing and merging, those within the decoder's own time included."""

    timings: Timings
    kv_bytes: float
    kept: float
    choosing: float


def run(vlm: VLM, compression: Compression, items: Sequence[Question], tokens: int) -> Cost:
    """One batch through the pipeline's stages, and then `tokens` tokens each, whatever they say. Raises the error of any of its rows."""
    clock = Clock(device_of(vlm))
    ready = prepare(vlm, compression, items, tokens, clock)
    for error in ready.errors.values():
        raise error
    assert ready.context is not None, "no row failed"
    held = _bytes(ready.context.cache, vlm.decoder.config.layers) / len(items)
    configs = [GenerationConfig(max_tokens=tokens)] * len(items)
    with clock.stage("decode"):
        # nothing stops them, so that as much is said with many tokens as with few
        steps = generate(vlm.decoder, ready.context.hidden, ready.context.cache, configs, vlm.tokenizer.decode, frozenset())
        collect(steps, len(items))
    rows, timings = ready.rows.values(), clock.timings
    inside = 1000 * sum(sight.audit.seconds for row in rows for sight in row.sights) if compression.inside_decoder else 0.0
    return Cost(timings, held, sum(row.kept for row in rows) / sum(row.visual for row in rows), timings.compress + inside)


def cost(vlm: VLM, compression: Compression, asked: Sequence[Asked], tokens: int, repeats: int, pixels: bool) -> Cost:
    """Medians over `repeats` runs of the first question about each input, from `pixels` on; else as `sources` says."""
    given = [one.media for one in asked] if pixels else sources(compression, asked)
    items: list[Question] = [(source, one.questions[0].question) for source, one in zip(given, asked, strict=True)]
    return _medians([run(vlm, compression, items, tokens) for _ in range(repeats)])


def paired(vlm: VLM, plans: Sequence[Compression], items: Sequence[Question], tokens: int, pairs: int) -> list[tuple[Cost, float]]:
    """All plans in turn and `pairs` times, from pixels to the last token: medians, and the median of how many times the first is slower."""
    rounds = [[run(vlm, plan, items, tokens) for plan in plans] for _ in range(pairs)]
    found = []
    for place in range(len(plans)):
        ratios = [one[0].timings.total / one[place].timings.total for one in rounds]
        found.append((_medians([one[place] for one in rounds]), statistics.median(ratios)))
    return found


def long_clips(artist: Artist, count: int, frames: int, seed: int) -> list[Question]:
    """`count` questions, each about a clip of so many frames, drawn as those that mini is trained on and played more slowly."""
    items = list[Question]()
    for number in range(count):
        shown = clip(artist, np.random.default_rng((seed, 3, number))).frames
        slower = shown[np.arange(frames) * len(shown) // frames]
        items.append((_video(slower), "What happens?"))
    return items


@torch.no_grad()
def lost(vlm: VLM, compression: Compression, asked: Sequence[Asked]) -> tuple[float, float] | None:
    """Mean error and coverage of a step between encoder and decoder, in the space that it works in; none where it works inside either.

    A method that asks is told the first question about each input.
    """
    if not all(isinstance(step.method, Compressor) and not isinstance(step.method, Thinner) for step in compression.steps):
        return None
    tokens = between = [one.encoded.tokens for one in asked]
    if compression.behind.steps:
        between = [replace(item, features=features) for item, features in zip(tokens, vlm.connect(tokens), strict=True)]
    query = list(words(vlm, {row: Prompt.of([], one.questions[0].question) for row, one in enumerate(asked)}).values())
    found = [fidelity(full, short) for full, short in zip(between, compression(between, query), strict=True)]
    return statistics.mean(one.nqe for one in found), statistics.mean(one.coverage for one in found)


def _video(frames: np.ndarray) -> Video:
    return Video(torch.from_numpy(frames).permute(0, 3, 1, 2), torch.arange(len(frames)).float())


def _bytes(cache: KVCache, layers: int) -> int:
    """Keys and values of true entries, padding left out."""
    views = [cache.view(layer) for layer in range(layers)]
    return sum(2 * int(v.lengths.sum()) * v.keys.shape[1] * v.keys.shape[3] * v.keys.element_size() for v in views)


def _medians(runs: Sequence[Cost]) -> Cost:
    times = [asdict(one.timings) for one in runs]
    timings = Timings(**{stage: statistics.median(one[stage] for one in times) for stage in times[0]})
    return replace(runs[0], timings=timings, choosing=statistics.median(one.choosing for one in runs))
