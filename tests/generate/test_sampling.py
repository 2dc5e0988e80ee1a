"""The next token: admissible tokens as transformers chooses them, frequencies as the distribution says, seeds as promised."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.sampling import Sampler, admissible

CPU = torch.device("cpu")
V = 50


def logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def expected(scores: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The probabilities by transformers' own processors, in its order."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(config.temperature)])
    if config.top_k:
        steps.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        steps.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        steps.append(MinPLogitsWarper(config.min_p))
    no_ids = torch.zeros(scores.shape[0], 1, dtype=torch.int64)
    return steps(no_ids, scores).softmax(-1)


CONFIGS = [
    GenerationConfig(temperature=1.0),
    GenerationConfig(temperature=0.7, top_k=5),
    GenerationConfig(temperature=1.5, top_p=0.8),
    GenerationConfig(temperature=1.0, top_p=1e-6),
    GenerationConfig(temperature=2.0, min_p=0.1),
    GenerationConfig(temperature=1.0, min_p=1.0),
    GenerationConfig(temperature=1.3, top_k=20, top_p=0.7, min_p=0.05),
    GenerationConfig(temperature=1.0, top_k=1_000),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_admissible_tokens_are_those_of_transformers(config: GenerationConfig) -> None:
    scores = logits(40)
    columns = [torch.full((40, 1), value) for value in (config.top_p, config.min_p)]
    kept = admissible(scores / config.temperature, torch.full((40, 1), config.top_k), *columns)
    torch.testing.assert_close(kept.softmax(-1), expected(scores, config))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_frequencies_follow_the_distribution(config: GenerationConfig) -> None:
    rows, steps = 400, 10
    n = rows * steps
    row = logits(1, seed=3, scale=2.0)
    sampler = Sampler.of([replace(config, seed=seed) for seed in range(rows)], CPU)
    drawn = torch.cat([sampler(row.expand(rows, -1)) for _ in range(steps)])
    counts = torch.bincount(drawn, minlength=V).float()
    probability = expected(row, config)[0]
    assert counts[probability == 0].sum() == 0
    # Pearson's chi-squared over the cells that a normal approximation allows, the rest in one: within 5 sigma of its mean.
    often = probability * n >= 5
    cells = torch.cat([probability[often], probability[~often].sum()[None]]) * n
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    cells, seen = cells[cells > 1e-3], seen[cells > 1e-3]
    freedom = max(1, len(cells) - 1)
    assert ((seen - cells) ** 2 / cells).sum() < freedom + 5 * math.sqrt(2 * freedom)


def draws(configs: list[GenerationConfig], row: int, steps: int) -> list[int]:
    sampler = Sampler.of(configs, CPU)
    scores = logits(steps, seed=9)
    # Every row of the batch sees other logits, only `row` the ones that are compared.
    return [int(sampler(torch.stack([scores[s].roll(i - row) for i in range(len(configs))]))[row]) for s in range(steps)]


def test_a_seed_gives_the_same_tokens_in_any_batch_and_place() -> None:
    mine = GenerationConfig(temperature=1.0, seed=7)
    strangers = [
        GenerationConfig(),
        GenerationConfig(temperature=2.0, top_k=3, seed=1),
        GenerationConfig(temperature=0.5, top_p=0.5, seed=2),
    ]
    alone = draws([mine], 0, 30)
    assert draws([*strangers, mine], 3, 30) == alone
    assert draws([mine, *strangers], 0, 30) == alone
    torch.manual_seed(123)
    torch.rand(1_000)
    assert draws([mine], 0, 30) == alone


def test_other_seeds_give_other_tokens() -> None:
    runs = {tuple(draws([GenerationConfig(temperature=1.5, seed=seed)], 0, 20)) for seed in range(5)}
    assert len(runs) == 5


def test_the_longest_answer_allowed_does_not_change_the_beginning() -> None:
    short, long = (draws([GenerationConfig(temperature=1.0, seed=4, max_tokens=n)], 0, 10) for n in (10, 10_000))
    assert short == long


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    scores = logits(3)
    sampler = Sampler.of([GenerationConfig(), GenerationConfig(temperature=5.0), GenerationConfig()], CPU)
    for _ in range(20):
        ids = sampler(scores)
        assert ids[0] == scores[0].argmax()
        assert ids[2] == scores[2].argmax()


def test_a_very_low_temperature_is_finite_and_greedy() -> None:
    scores = logits(4)
    sampler = Sampler.of([GenerationConfig(temperature=1e-4)] * 4, CPU)
    assert torch.equal(sampler(scores), scores.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_in_single(dtype: torch.dtype) -> None:
    scores = logits(2).to(dtype)
    ids = Sampler.of([GenerationConfig(temperature=0.8, top_p=0.9, seed=5)] * 2, CPU)(scores)
    again = Sampler.of([GenerationConfig(temperature=0.8, top_p=0.9, seed=5)] * 2, CPU)(scores.float())
    assert torch.equal(ids, again)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("stop", ("ok", "")),
    ],
)
def test_a_setting_that_cannot_be_is_named(setting: str, value: object) -> None:
    with pytest.raises(InputError, match=setting):
        GenerationConfig(**{setting: value})  # type: ignore[arg-type]
