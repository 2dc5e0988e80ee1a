"""Beam search against transformers' own, and against searches that read everything anew; and what it promises of ends and caches."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList
from transformers.utils import logging

from mmsdk import plugins
from mmsdk.decoder.prefill import Laid, capacities, prefill_into
from mmsdk.decoder.spans import Span
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.beams import search
from mmsdk.generate.config import EarlyStopping, GenerationConfig
from mmsdk.generate.loop import Generated, collect, generate
from mmsdk.kv.memory import KINDS, Memory, PagedMemory, memory_of
from mmsdk.kv.none import NoCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import PAGE, Pages
from mmsdk.kv.policy_memory import POLICIES
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.shape import Shape
from mmsdk.kv.types import KVCache
from mmsdk.models.text import read_decoder

PROMPTS = [[5, 9, 20], [17], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
# Prompts of so many blocks, and a token more.
LONG = [[(7 * place + row) % 24 for place in range(3 * PAGE + 1)] for row in range(2)]
ENDS = frozenset({7, 11})
NOWHERE: frozenset[int] = frozenset()
Pair = tuple[LlamaForCausalLM, Decoder]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Pair]:
    """A real llama at a tiny size by its seed and vocabulary, and ours from the folder that it wrote."""
    made: dict[tuple[int, int], Pair] = {}
    logging.disable_progress_bar()

    def find(seed: int, vocabulary: int = 24) -> Pair:
        if (seed, vocabulary) not in made:
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, initializer_range=0.25,
            )  # fmt: skip
            model, folder = LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("llama")
            model.save_pretrained(folder)
            made[seed, vocabulary] = model, read_decoder(folder, torch.float32)
        return made[seed, vocabulary]

    yield find
    logging.enable_progress_bar()


def letters(ids: Sequence[int]) -> str:
    """A token is a letter."""
    return "".join(chr(ord("a") + one) for one in ids)


def read(decoder: Decoder, prompts: Sequence[Sequence[int]], memory: Memory, beams: int = 1, room: int = 0) -> tuple[Tensor, KVCache]:
    """The decoder's output at the end of every prompt, and the cache."""
    rows = [
        Laid(decoder.embed(torch.tensor([prompt]))[0].detach(), torch.arange(len(prompt)), (Span(-1, (len(prompt),)),))
        for prompt in prompts
    ]
    config = decoder.config
    shape = Shape(config.layers, config.kv_heads, config.entry, torch.float32, torch.device("cpu"))
    cache, _ = memory.begin(shape, capacities(decoder, rows, (), room), [()] * len(rows), beams, room)
    with torch.no_grad():
        hidden = prefill_into(decoder, rows, (), cache, memory.chunk).hidden[:, -1]
    memory.learn(cache, [()] * len(rows))
    return hidden, cache


def searched(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    ends: frozenset[int] = ENDS,
    kv: str = "dense",
    decode: Callable[[Sequence[int]], str] = letters,
) -> list[tuple[Generated, ...]]:
    hidden, cache = read(decoder, prompts, memory_of(kv), config.num_beams, config.max_tokens)
    return search(decoder, hidden, cache, [config] * len(prompts), decode, ends, prompts)


def theirs(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    ends: frozenset[int] = ENDS,
    stopping: StoppingCriteriaList | None = None,
) -> list[Tensor]:
    """Sequences [b * k, s] behind the prompts, and scores [b * k], of transformers."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=config.max_tokens, do_sample=False, num_beams=config.num_beams,
        num_return_sequences=config.num_beams, length_penalty=config.length_penalty, early_stopping=config.early_stopping,
        repetition_penalty=config.repetition_penalty, eos_token_id=sorted(ends) or None, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, stopping_criteria=stopping,
    )  # fmt: skip
    return [out.sequences[:, longest:], out.sequences_scores]


def spoken(decoder: Decoder, prompt: Sequence[int], said: Sequence[int]) -> list[float]:
    """How likely each word is behind those before it, from one pass over all of them."""
    ids = torch.tensor([[*prompt, *said]])
    with torch.no_grad():
        logits = decoder.logits(decoder(decoder.embed(ids), torch.arange(ids.shape[1])[None], NoCache()))[0]
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(said)[:, None])[:, 0].tolist()


@torch.no_grad()
def total(decoder: Decoder, hidden: Tensor, cache: KVCache, said: Sequence[int]) -> float:
    """The sum of the logarithms of what is said, word by word."""
    logprobs = list[Tensor]()
    for token in said:
        logprobs.append(decoder.logits(hidden).log_softmax(-1)[0, token])
        hidden = decoder(decoder.embed(torch.tensor([[token]])), cache.position[:, None], cache)[:, -1]
    return float(sum(logprobs))


def held(cache: KVCache) -> tuple[int, int]:
    """Blocks of its pool that anyone holds, exact and rounded."""
    assert isinstance(cache, PagedCache)
    store = cache._store
    return store.blocks.held, store.old.held if isinstance(store, RoundedPages) else 0


def same(ours: Sequence[tuple[Generated, ...]], expected: Sequence[Tensor], ends: frozenset[int] = ENDS) -> set[str]:
    """Holds all answers of all rows to those of transformers, in order; why they ended."""
    flat = [answer for row in ours for answer in row]
    assert len(flat) == len(expected[0])
    for answer, ids, score in zip(flat, *expected, strict=True):
        said = ids.tolist()
        stop = next((place for place, token in enumerate(said) if token in ends), len(said))
        assert answer.ids == tuple(said[:stop]) and answer.finish == ("stop" if stop < len(said) else "length")
        assert answer.score == pytest.approx(float(score), rel=1e-5, abs=1e-5) and answer.text == letters(answer.ids)
    return {str(answer.finish) for answer in flat}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beams", [2, 4])
def test_answers_and_scores_are_transformers_own(pairs: Callable[..., Pair], seed: int, beams: int) -> None:
    """A batch of unlike lengths, some of whose answers end amid the search; every way to stop, and lengths that count for and against."""
    model, decoder = pairs(seed)
    finishes, lengths = set[str](), set[int]()
    early: EarlyStopping
    for early, penalty in ((False, 1.0), (False, -0.5), (True, 2.0), ("never", 0.0), ("never", 1.0)):
        config = GenerationConfig(max_tokens=9, num_beams=beams, early_stopping=early, length_penalty=penalty)
        found = searched(decoder, PROMPTS, config)
        finishes |= same(found, theirs(model, PROMPTS, config))
        lengths |= {len(answer.ids) for row in found for answer in row}
    assert finishes == {"stop", "length"} and len(lengths) >= 2


def test_without_an_end_and_with_a_penalty_they_are_too(pairs: Callable[..., Pair]) -> None:
    """A prompt at a time: to transformers, what pads one is said in it."""
    model, decoder = pairs(2)
    for prompt in PROMPTS:
        config = GenerationConfig(max_tokens=7, num_beams=3, repetition_penalty=1.7)
        same(searched(decoder, [prompt], config, NOWHERE), theirs(model, [prompt], config, NOWHERE), NOWHERE)
        same(searched(decoder, [prompt], config), theirs(model, [prompt], config))


def test_a_stop_string_ends_a_beam_as_a_criterion_of_transformers_does(pairs: Callable[..., Pair]) -> None:
    """Its tokens are told, its letters are not; the beams beside it go on."""
    model, decoder = pairs(0)
    first = searched(decoder, PROMPTS[:1], GenerationConfig(max_tokens=8, num_beams=4))[0]
    stop = next(answer.text for answer in first if len(answer.ids) > 4)[1:3]

    def said(ids: Tensor, scores: object, **left: object) -> Tensor:
        return torch.tensor([stop in letters(row[len(PROMPTS[0]) :].tolist()) for row in ids])

    config = GenerationConfig(max_tokens=8, num_beams=4, stop=(stop,))
    expected = theirs(model, PROMPTS[:1], config, stopping=StoppingCriteriaList([said]))
    (found,) = searched(decoder, PROMPTS[:1], config)
    assert [answer.score for answer in found] == pytest.approx(expected[1].tolist(), rel=1e-5)
    stopped = [answer for answer in found if stop in letters(answer.ids)]
    assert stopped and len(stopped) < len(found)
    assert all(answer.finish == "stop" and answer.text == letters(answer.ids).partition(stop)[0] for answer in stopped)


def test_with_enough_beams_the_search_is_exhaustive(pairs: Callable[..., Pair]) -> None:
    """Every answer there is of five words, by whole passes without a cache; the best of them in order, one end among the words."""
    decoder, end, most = pairs(2, 5)[1], 3, 3
    prompt, scores = [4, 0, 2], dict[tuple[int, ...], float]()
    for length in range(1, most + 1):
        for said in itertools.product(range(5), repeat=length):
            if end in said[:-1] or (said[-1] != end and length < most):
                continue
            scores[said] = sum(spoken(decoder, prompt, said)) / length**0.7
    best = sorted(scores, key=lambda said: -scores[said])
    config = GenerationConfig(max_tokens=most, num_beams=150, length_penalty=0.7)
    (found,) = searched(decoder, [prompt], config, frozenset({end}))
    assert len(found) == len(best) == 1 + 4 + 4 * 4 * 5
    assert [answer.score for answer in found] == pytest.approx([scores[said] for said in best], rel=1e-5)
    assert found[0].ids == tuple(token for token in best[0] if token != end)


@pytest.mark.parametrize("kv", [*KINDS, *(f"{name}:20" for name in plugins.available(POLICIES))])
def test_every_memory_goes_on_with_its_beams(pairs: Callable[..., Pair], kv: str) -> None:
    """The score of every answer is what its words get one by one, alone, from a memory of that kind."""
    decoder, end = pairs(0)[1], 7
    config = GenerationConfig(max_tokens=5, num_beams=3, length_penalty=0.0)
    prompts = [(LONG[0] * 4)[:150], LONG[1]]
    for prompt, found in zip(prompts, searched(decoder, prompts, config, frozenset({end}), kv), strict=True):
        assert len(found) == 3
        for answer in found:
            hidden, cache = read(decoder, [prompt], memory_of(kv), 1, config.max_tokens)
            said = answer.ids if answer.finish == "length" else (*answer.ids, end)
            assert answer.score == pytest.approx(total(decoder, hidden, cache, said), rel=1e-4)


def test_beams_share_the_blocks_of_a_prompt_and_give_all_back(pairs: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four beams over three full blocks and a token hold those once, and a few of their own; a reorder copies none that is full."""
    decoder, beams, config = pairs(0)[1], 4, GenerationConfig(max_tokens=20, num_beams=4)
    taken, copied, lengths = list[int](), list[int](), list[int]()
    memory = PagedMemory()
    hidden, cache = read(decoder, LONG[:1], memory, beams, config.max_tokens)
    assert isinstance(cache, PagedCache)
    layers, full, table = decoder.config.layers, len(LONG[0]) // PAGE, cache.columns(0)
    assert memory.held == layers * (full + 1)
    shared, original = set(table[:full]), Pages.copy

    def copy(pages: Pages, among: range, source: int, target: int) -> None:
        copied.append(source)
        original(pages, among, source, target)

    monkeypatch.setattr(Pages, "copy", copy)

    def look(_: object, given: tuple[Tensor, ...]) -> None:
        taken.append(memory.held)
        lengths.append(len(given[0]))

    hook = decoder.layers[0].register_forward_pre_hook(look)
    (found,) = search(decoder, hidden, cache, [config], letters, NOWHERE)
    hook.remove()
    assert len(found) == beams and max(lengths) == beams and len(lengths) == config.max_tokens - 1
    # of its own a beam has the block that was begun, and another where that is full
    assert max(taken) <= layers * (full + 1 + 2 * beams) < layers * beams * (full + 1)
    assert copied and not shared & set(copied)
    assert cache.columns(0) == table and memory.held == layers * (full + 1)
    del cache
    assert memory.held == 0


@pytest.mark.parametrize("kv", ["dense", "paged", "int4"])
def test_rows_have_their_own_settings_and_are_as_alone(pairs: Callable[..., Pair], kv: str) -> None:
    """One that is greedy, one that ends by its stop string, one that is done long before the others."""
    decoder = pairs(0)[1]
    configs = [
        GenerationConfig(max_tokens=6),
        GenerationConfig(max_tokens=12, num_beams=4, length_penalty=2.0, logprobs=1),
        GenerationConfig(max_tokens=2, num_beams=2, stop=("x",), early_stopping=True),
    ]
    memory = memory_of(kv)
    hidden, cache = read(decoder, PROMPTS, memory, 4, 12)
    together = search(decoder, hidden, cache, configs, letters, ENDS, PROMPTS)
    for prompt, config, found in zip(PROMPTS, configs, together, strict=True):
        own = read(decoder, [prompt], memory_of(kv), config.num_beams, config.max_tokens)
        (alone,) = search(decoder, *own, [config], letters, ENDS, [prompt])
        assert [(one.ids, one.text, one.finish) for one in found] == [(one.ids, one.text, one.finish) for one in alone]
        assert [one.score for one in found] == pytest.approx([one.score for one in alone], rel=1e-4)
    (greedy,) = collect(generate(decoder, *read(decoder, PROMPTS[:1], memory_of(kv)), configs[:1], letters, ENDS), 1)
    assert together[0][0].ids == greedy.ids and together[0][0].finish == greedy.finish


def test_log_probabilities_make_up_the_score(pairs: Callable[..., Pair]) -> None:
    """They are of each answer's own words, whatever place its beam had, before penalties."""
    decoder = pairs(0)[1]
    config = GenerationConfig(max_tokens=8, num_beams=4, logprobs=2, length_penalty=0.0)
    (found,) = searched(decoder, PROMPTS[:1], config, NOWHERE)
    (penalised,) = searched(decoder, PROMPTS[:1], replace(config, presence_penalty=1.0), NOWHERE)
    for answer in (*found, *penalised):
        assert [one.id for one in answer.logprobs] == list(answer.ids)
        assert [one.logprob for one in answer.logprobs] == pytest.approx(spoken(decoder, PROMPTS[0], answer.ids), rel=1e-4, abs=1e-5)
        assert all(len(one.top) == 2 and one.top[0].logprob >= max(one.top[1].logprob, one.logprob) for one in answer.logprobs)
    assert [answer.score for answer in found] == pytest.approx([sum(one.logprob for one in answer.logprobs) for answer in found], rel=1e-4)
    assert penalised[0].score < sum(one.logprob for one in penalised[0].logprobs) or len(set(penalised[0].ids)) == 8


def test_time_ends_a_search_with_what_there_is(pairs: Callable[..., Pair]) -> None:
    (found,) = searched(pairs(0)[1], PROMPTS[:1], GenerationConfig(max_tokens=100, num_beams=3, max_time=1e-6), NOWHERE)
    assert [(len(answer.ids), answer.finish) for answer in found] == [(1, "time")] * 3


@pytest.mark.parametrize("kv", ["paged", "int4"])
def test_what_breaks_a_search_off_gives_all_blocks_back(pairs: Callable[..., Pair], kv: str) -> None:
    """Ctrl-C amid the search, and weights that are not finite, which end their row with an error."""
    decoder, config = pairs(1)[1], GenerationConfig(max_tokens=8, num_beams=3, stop=("zz",))
    memory, said = memory_of(kv), list[int]()

    def interrupted(ids: Sequence[int]) -> str:
        said.append(1)
        if len(said) > 20:
            raise KeyboardInterrupt
        return letters(ids)

    hidden, cache = read(decoder, LONG[:1], memory, 3, 8)
    before = held(cache)
    with pytest.raises(KeyboardInterrupt):
        search(decoder, hidden, cache, [config], interrupted, NOWHERE)
    assert held(cache) == before > (0, -1)
    (found,) = search(decoder, torch.full_like(hidden, torch.nan), cache, [config], letters, NOWHERE)
    assert len(found) == 1 and isinstance(found[0].finish, ModelError) and "not finite" in str(found[0].finish)
    assert held(cache) == before


@pytest.mark.parametrize(
    ("settings", "item"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams"),
        ({"length_penalty": 17.0}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, object], item: str) -> None:
    with pytest.raises(InputError) as caught:
        GenerationConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.item == item


def test_the_loop_of_single_tokens_refuses_beams_and_rows_need_their_settings(pairs: Callable[..., Pair]) -> None:
    decoder, config = pairs(0)[1], GenerationConfig(num_beams=2)
    hidden, cache = read(decoder, PROMPTS, memory_of("dense"))
    with pytest.raises(InputError, match="num_beams"):
        collect(generate(decoder, hidden, cache, [config] * 3, letters, ENDS), 3)
    with pytest.raises(InputError, match="configs"):
        search(decoder, hidden, cache, [config], letters, ENDS)
