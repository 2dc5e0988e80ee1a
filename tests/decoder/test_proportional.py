"""Proportional attention in the decoder: a token of mass log w is, to all others and to itself, what w tokens at its position would be."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.compress import Compression, compression
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.decoder.sight import Local
from mmsdk.decoder.spans import Span
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, PluginError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import PagedMemory
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import Recall
from mmsdk.serve.engine import Engine
from mmsdk.stages import Clock, prepare
from mmsdk.vision.types import Image

CONFIG = DecoderConfig(vocabulary=50, width=24, layers=3, heads=4, kv_heads=2, head_dim=6, inner=40, context=256)
# how many tokens each stands for; two prompts of different lengths
COUNTS = ((1, 3, 2, 1, 1), (1, 4, 1))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(CONFIG).state_dict().items()}
    return Decoder.of(CONFIG, {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}).requires_grad_(False)


def laid(x: Tensor, positions: Tensor, mass: tuple[Tensor, ...] = ()) -> Laid:
    return Laid(x, positions, (Span(-1, (len(x),)),), mass=mass)


def prompts() -> tuple[list[Laid], list[Laid]]:
    """With masses, and with as many tokens at each position."""
    weighed, repeated = [], []
    for row, counts in enumerate(COUNTS):
        x, times = torch.randn(len(counts), 24, generator=torch.Generator().manual_seed(row)), torch.tensor(counts)
        weighed.append(laid(x, torch.arange(len(x)), (times.float().log(),)))
        repeated.append(laid(x.repeat_interleave(times, 0), torch.arange(len(x)).repeat_interleave(times)))
    return weighed, repeated


def spoken(decoder: Decoder, hidden: Tensor, cache: DenseCache, steps: int) -> list[Tensor]:
    found = [hidden]
    for _ in range(steps):
        ids = decoder.logits(found[-1]).argmax(-1, keepdim=True)
        found.append(decoder(decoder.embed(ids), cache.position[:, None], cache)[:, -1])
    return found


def test_mass_is_as_many_tokens_at_one_position(decoder: Decoder) -> None:
    weighed, repeated = prompts()
    (mine, cache), (theirs, other) = prefilled(decoder, weighed, (), 8), prefilled(decoder, repeated, (), 8)
    torch.testing.assert_close(mine.hidden[:, -1], theirs.hidden[:, -1])
    # the last of the first prompt's copies, too
    torch.testing.assert_close(mine.hidden[0, 1:3], theirs.hidden[0, torch.tensor([3, 5])])
    for one, two in zip(spoken(decoder, mine.hidden[:, -1], cache, 3), spoken(decoder, theirs.hidden[:, -1], other, 3), strict=True):
        torch.testing.assert_close(one, two)
    plain, _ = prefilled(decoder, [replace(row, mass=()) for row in weighed], (), 8)
    assert not torch.allclose(mine.hidden[:, -1], plain.hidden[:, -1], atol=1e-3)


def test_masses_go_with_rows_and_forks(decoder: Decoder) -> None:
    weighed, _ = prompts()
    run, cache = prefilled(decoder, weighed, (), 8)
    _, again = prefilled(decoder, weighed, (), 8)
    wanted = spoken(decoder, run.hidden[:, -1], cache.fork(), 2)
    rows = torch.tensor([1, 0, 1])
    for one, two in zip(spoken(decoder, run.hidden[rows, -1], again.select(rows), 2), wanted, strict=True):
        torch.testing.assert_close(one, two[rows])


def test_a_window_sees_masses_too(decoder: Decoder) -> None:
    """Where local layers see the last positions alone, what they see of them counts as much."""
    config = replace(CONFIG, local=Local(layers=(0, 2), window=3, theta=CONFIG.rope_theta))
    local = Decoder.of(config, decoder.state_dict()).requires_grad_(False)
    weighed, repeated = prompts()
    (mine, _), (theirs, _) = prefilled(local, weighed, (), 8), prefilled(local, repeated, (), 8)
    torch.testing.assert_close(mine.hidden[:, -1], theirs.hidden[:, -1])


def test_visual_tokens_of_a_pipeline_count_as_those_that_there_were(small: Mini) -> None:
    """4 of 16 tokens as 4 each, words as one; and a step inside the decoder by what goes in."""
    picture = Image(torch.randint(0, 256, (3, 56, 56), generator=torch.Generator().manual_seed(1), dtype=torch.uint8))
    ready = prepare(small, compression(["uniform:4", "proportional"]), [(picture, "What is it?")], 4, Clock(torch.device("cpu")))
    assert ready.context is not None
    (row,), times = ready.rows.values(), torch.ones(len(ready.rows[0].embeddings), dtype=torch.long)
    times[1:5] = 4
    torch.testing.assert_close(row.mass[0].exp(), times.float())
    there = laid(row.embeddings.repeat_interleave(times, 0), row.positions.repeat_interleave(times))
    run, _ = prefilled(small.decoder, [there], (), 4)
    torch.testing.assert_close(ready.context.hidden, run.hidden[:, -1], rtol=1e-4, atol=1e-4)
    inside = prepare(small, compression(["deft:4", "proportional"]), [(picture, "What is it?")], 4, Clock(torch.device("cpu")))
    assert inside.rows[0].mass[0][1:8].exp().tolist() == pytest.approx([16 / 7] * 7)
    answers = [
        Pipeline(small, compression(steps))(picture, "What is it?", max_tokens=4)
        for steps in ("uniform:16", ["uniform:16", "proportional"])
    ]
    assert answers[0].ids == answers[1].ids and answers[0].tokens == answers[1].tokens


def test_what_keeps_no_masses_is_refused(small: Mini) -> None:
    with pytest.raises(PluginError, match="positions=keep"):
        compression(["pyramiddrop:0.5", "proportional"])
    assert compression(["proportional", "pyramiddrop:0.5,positions=keep"]).proportional
    assert compression("proportional") == Compression((), proportional=True)
    spec = compression(["uniform:4", "proportional"])
    with pytest.raises(InputError, match="kv"):
        prepare(small, spec, [], 4, Clock(torch.device("cpu")), recall=Recall(PagedMemory()))
    with pytest.raises(InputError, match="pages"):
        Engine(Pipeline(small, spec))
    with pytest.raises(PluginError, match="stream"):
        Pipeline(small, spec).stream_session()
    assert math.isclose(spec.steps[0].budget(16).count, 4)
