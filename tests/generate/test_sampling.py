"""The next token: admissible tokens as transformers chooses them, frequencies as the distribution says, seeds as promised."""

import math
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.sampling import Sampler, admissible, likeliest
from mmsdk.kernels.ops.sample import sample

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


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("more", [{}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_lowest_temperatures_draw_the_best_token(temperature: float, more: dict[str, float]) -> None:
    scores = logits(8, scale=30.0)
    sampler = Sampler.of([GenerationConfig(temperature=temperature, seed=seed, **more) for seed in range(8)], CPU)
    assert torch.equal(sampler(scores), scores.argmax(-1))


@pytest.mark.parametrize("temperature", [1e300, pytest.param(10**400, id="beyond any float")])
def test_the_highest_temperatures_draw_any_token_but_those_that_cannot_be(temperature: float) -> None:
    scores = torch.tensor([[0.0, 50.0, -torch.inf, -50.0]]).expand(400, -1)
    drawn = Sampler.of([GenerationConfig(temperature=temperature, seed=seed) for seed in range(400)], CPU)(scores)
    counts = torch.bincount(drawn, minlength=4)
    assert counts[2] == 0 and counts[[0, 1, 3]].min() > 80


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of types at every call, as users run it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_are_numbers_of_their_kind() -> None:
    theirs = GenerationConfig(np.int64(5), np.float32(0.5), np.int32(3), np.float64(0.75), seed=np.int64(7))
    ours, scores = GenerationConfig(5, 0.5, 3, 0.75, seed=7), logits(1)
    assert theirs == ours and int(Sampler.of([theirs], CPU)(scores)) == int(Sampler.of([ours], CPU)(scores))
    for value in (np.float64(5), np.bool_(True), np.array([5])):
        with pytest.raises(InputError, match="max_tokens"):
            GenerationConfig(value)


def test_a_random_number_that_is_zero_takes_no_token_out() -> None:
    # The only token that can be, drawn with the one uniform number in some ten million that is exactly 0.
    seed, place = next(
        (seed, int(zeros[0, 0]))
        for seed in range(100)
        if len(zeros := (torch.rand(1 << 22, generator=torch.Generator().manual_seed(seed)) == 0).nonzero())
    )
    sampler = Sampler.of([GenerationConfig(temperature=1.0, seed=seed)], CPU)
    torch.rand(place - 3, generator=sampler.generators[0])
    assert int(sampler(torch.tensor([[-torch.inf, -torch.inf, -torch.inf, 0.0]]))) == 3
    # and the noise is finite for every one of them
    again = Sampler.of([GenerationConfig(temperature=1.0, seed=seed)], CPU)
    torch.rand(place - 3, generator=again.generators[0])
    assert again._noise(64).isfinite().all()


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
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", None),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", 2**63),
        ("top_p", "0.9"),
        ("min_p", (0.1,)),
        ("seed", 1.0),
        ("seed", 2**63),
        ("stop", (1,)),
        ("stop", (b"x",)),
        ("stop", "x"),
        ("stop", ["x"]),
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
        ("stop", ("ok", "\ud83d")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("max_time", 0.0),
        ("max_time", math.nan),
        ("logprobs", -1),
        ("logprobs", True),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_setting_that_cannot_be_is_named(setting: str, value: object) -> None:
    with pytest.raises(InputError, match=setting):
        GenerationConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("v", [256, 49152, 1000])
def test_the_likeliest_word_is_the_first_of_the_largest(v: int) -> None:
    """With equals in one block and in several, infinite scores, and what is no number, which counts as the largest."""
    logits = torch.randn(6, v, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    logits[1, [5, 7, v - 1]] = 9.0
    logits[2, [v - 2, v // 2]] = torch.inf
    logits[3, 11] = torch.nan
    logits[4] = -torch.inf
    assert likeliest(logits).tolist() == logits.argmax(-1).tolist()
    assert likeliest(logits).tolist()[1:5] == [5, v // 2, 11, 0]


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_kernel_of_a_draw_leaves_the_same_tokens_with_the_same_probabilities(config: GenerationConfig, equal: bool) -> None:
    """A number amid a token's share of [0, 1) draws that token, and a token that is taken out has no share; also among equal scores."""
    scores = (logits(1).div(2).round() if equal else logits(1)).masked_fill(torch.arange(V) % 7 == 3, -torch.inf)
    sampler = Sampler.of([config], CPU)
    shares = admissible(scores / config.temperature, sampler.top_k, sampler.top_p, sampler.min_p).double().softmax(-1)[0]
    kept = shares.nonzero()[:, 0]
    amid = (shares.cumsum(0) - shares / 2)[kept]
    settings = (column[:, 0].expand(len(kept)) for column in (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p))
    assert torch.equal(sample(scores.expand(len(kept), -1), *settings, amid.float()), kept)
