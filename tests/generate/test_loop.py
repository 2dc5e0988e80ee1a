"""The decoding loop against transformers' own generate, and what it promises about rows, ends and interruptions."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import Generated, Step, collect, generate
from mmsdk.kv.dense import DenseCache

PROMPTS = [[5, 9, 200], [17], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [250, 251, 252, 253]]
NO_END: frozenset[int] = frozenset()


def tiny(vocabulary: int = 256) -> LlamaForCausalLM:
    """A real llama at a tiny size, with weights large enough that its greedy text varies. Its tokens are bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, **sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def ours_of(model: LlamaForCausalLM) -> Decoder:
    """The same weights in our decoder, with projections fused here by hand."""
    c = model.config
    config = DecoderConfig(
        vocabulary=c.vocab_size, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, inner=64, context=512, norm_eps=c.rms_norm_eps
    )
    state: dict[str, Tensor] = {
        "embedding.weight": model.model.embed_tokens.weight,
        "head.weight": model.lm_head.weight,
        "norm.weight": model.model.norm.weight,
    }
    for index, layer in enumerate(model.model.layers):
        a, m = layer.self_attn, layer.mlp
        state[f"layers.{index}.attention.qkv.weight"] = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        state[f"layers.{index}.attention.o.weight"] = a.o_proj.weight
        state[f"layers.{index}.mlp.gate_up.weight"] = torch.cat([m.gate_proj.weight, m.up_proj.weight])
        state[f"layers.{index}.mlp.down.weight"] = m.down_proj.weight
        state[f"layers.{index}.norm1.weight"] = layer.input_layernorm.weight
        state[f"layers.{index}.norm2.weight"] = layer.post_attention_layernorm.weight
    return Decoder.of(config, {name: tensor.detach() for name, tensor in state.items()})


def prefilled(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], pad: int = 0) -> tuple[Decoder, Tensor, DenseCache]:
    """The decoder, its output at each prompt's last token, and the cache, from one left-padded pass."""
    decoder = ours_of(model)
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    positions = torch.tensor([[-1] * (longest - len(prompt)) + list(range(len(prompt))) for prompt in prompts])
    cache = DenseCache.allocate(2, len(prompts), 2, 8, longest + 8, torch.float32, "cpu")
    with torch.no_grad():
        return decoder, decoder(decoder.embed(ids), positions, cache)[:, -1], cache


def run(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], configs: Sequence[GenerationConfig], ends: frozenset[int] = NO_END
) -> list[Generated]:
    decoder, hidden, cache = prefilled(model, prompts)
    return collect(generate(decoder, hidden, cache, configs, decode, ends), len(prompts))


def theirs(model: LlamaForCausalLM, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


def test_greedy_ids_equal_transformers_generate_row_by_row_of_a_padded_batch() -> None:
    model = tiny()
    ours = run(model, PROMPTS, [GenerationConfig(max_tokens=24)] * len(PROMPTS))
    assert [row.ids for row in ours] == [theirs(model, prompt, 24) for prompt in PROMPTS]
    assert {row.finish for row in ours} == {"length"}


def test_two_sampled_tokens_have_the_joint_distribution_of_transformers() -> None:
    model = tiny(vocabulary=6)
    prompt, n = [1, 2, 3], 3_000
    config = GenerationConfig(max_tokens=2, temperature=0.8, top_k=5, top_p=0.95)
    configs = [replace(config, seed=seed) for seed in range(n)]
    pairs = torch.zeros(6, 6)
    decoder, hidden, cache = prefilled(model, [prompt] * n)
    for row in collect(generate(decoder, hidden, cache, configs, str, NO_END), n):
        pairs[row.ids] += 1
    expected = joint(model, prompt) * n
    assert pairs[expected == 0].sum() == 0
    cells = expected >= 5
    freedom = int(cells.sum())
    assert ((pairs - expected) ** 2 / expected)[cells].sum() < freedom + 5 * (2 * freedom) ** 0.5


def joint(model: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    """p(first, second) from transformers' scores of a sampled run: its processed scores at both steps, for every first token."""

    def step(ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([ids])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1, do_sample=True, temperature=0.8, top_k=5, top_p=0.95,
            output_scores=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        return out.scores[0][0].softmax(-1)

    return torch.stack([p * step([*prompt, first]) for first, p in enumerate(step(prompt))])


def test_each_row_ends_for_itself_and_gives_no_step_afterwards() -> None:
    model = tiny()
    long = run(model, PROMPTS, [GenerationConfig(max_tokens=20)] * 4)
    text = long[3].text
    configs = [
        GenerationConfig(max_tokens=20),
        GenerationConfig(max_tokens=3),
        GenerationConfig(max_tokens=1),
        GenerationConfig(max_tokens=20, stop=(text[4:6],)),
    ]
    decoder, hidden, cache = prefilled(model, PROMPTS)
    steps = list(generate(decoder, hidden, cache, configs, decode, NO_END))
    ended: set[int] = set()
    for step in steps:
        assert step.row not in ended
        if step.finish:
            ended.add(step.row)
    rows = collect(steps, 4)
    assert [len(row.ids) for row in rows[:3]] == [20, 3, 1]
    assert [row.ids for row in rows[:3]] == [long[i].ids[:n] for i, n in enumerate((20, 3, 1))]
    assert rows[3].finish == "stop"
    assert rows[3].text == text[: text.index(text[4:6])]


def test_a_padding_id_that_ends_text_elsewhere_cuts_nothing() -> None:
    model = tiny()
    alone = [theirs(model, prompt, 10) for prompt in PROMPTS]
    unused = next(token for token in range(256) if all(token not in ids for ids in alone))
    decoder, hidden, cache = prefilled(model, PROMPTS, pad=unused)
    rows = collect(generate(decoder, hidden, cache, [GenerationConfig(max_tokens=10)] * 4, decode, frozenset({unused})), 4)
    assert [row.ids for row in rows] == alone


def test_seeded_rows_are_the_same_alone_and_among_rows_that_end_early() -> None:
    model = tiny()
    configs = [
        GenerationConfig(max_tokens=2, temperature=1.0, seed=3),
        GenerationConfig(max_tokens=16, temperature=1.2, top_p=0.9, seed=7),
        GenerationConfig(max_tokens=5),
        GenerationConfig(max_tokens=12, temperature=0.9, min_p=0.02, seed=7),
    ]
    together = run(model, PROMPTS, configs)
    assert together == [run(model, [prompt], [config])[0] for prompt, config in zip(PROMPTS, configs, strict=True)]


def test_an_end_id_ends_a_row_and_is_no_part_of_it() -> None:
    model = tiny()
    alone = theirs(model, PROMPTS[0], 12)
    end = alone[5]
    row = run(model, PROMPTS[:1], [GenerationConfig(max_tokens=12)], frozenset({end}))[0]
    assert row.ids == alone[: alone.index(end)]
    assert row.finish == "stop"


def test_closing_the_stream_leaves_the_cache_at_what_was_said_and_torch_as_it_was() -> None:
    model = tiny()
    decoder, hidden, cache = prefilled(model, PROMPTS[:1])
    steps = generate(decoder, hidden, cache, [GenerationConfig(max_tokens=20)], decode, NO_END)
    said = [next(steps) for _ in range(5)]
    assert torch.is_grad_enabled()
    steps.close()
    assert cache.position.tolist() == [len(PROMPTS[0]) + 4]
    assert tuple(token for step in said for token in step.ids) == theirs(model, PROMPTS[0], 5)
    assert run(model, PROMPTS[:1], [GenerationConfig(max_tokens=5)])[0].ids == theirs(model, PROMPTS[0], 5)


def test_an_interruption_inside_a_step_leaves_the_next_run_as_it_was() -> None:
    model = tiny()
    calls = 0

    def interrupted(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decode(ids)

    decoder, hidden, cache = prefilled(model, PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        list(generate(decoder, hidden, cache, [GenerationConfig(max_tokens=20)] * 4, interrupted, NO_END))
    assert torch.is_grad_enabled()
    rows = run(model, PROMPTS, [GenerationConfig(max_tokens=6)] * 4)
    assert [row.ids for row in rows] == [theirs(model, prompt, 6) for prompt in PROMPTS]


def test_a_token_is_computed_only_when_it_is_asked_for() -> None:
    decoder, hidden, cache = prefilled(tiny(), PROMPTS[:1])
    steps = generate(decoder, hidden, cache, [GenerationConfig(max_tokens=1_000_000)], decode, NO_END)
    before = cache.position.tolist()
    assert isinstance(next(steps), Step)
    assert cache.position.tolist() == before


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bad", [[2], [0, 1, 3]])
def test_a_row_whose_logits_are_not_finite_ends_alone(bad: list[int], value: float) -> None:
    model = tiny()
    decoder, hidden, cache = prefilled(model, PROMPTS)
    hidden[bad] = value
    rows = collect(generate(decoder, hidden, cache, [GenerationConfig(max_tokens=8)] * 4, decode, NO_END), 4)
    for place, row in enumerate(rows):
        if place in bad:
            assert isinstance(row.finish, ModelError) and "token 0 are not finite" in str(row.finish) and row.ids == ()
        else:
            assert row.finish == "length" and row.ids == theirs(model, PROMPTS[place], 8)


def test_a_row_that_breaks_on_the_way_keeps_what_it_said() -> None:
    model = tiny()
    decoder, hidden, cache = prefilled(model, PROMPTS)
    steps = generate(decoder, hidden, cache, [GenerationConfig(max_tokens=8)] * 4, decode, NO_END)
    said = [next(steps) for _ in range(8)]
    for layer in range(2):
        cache.view(layer).values[1] = torch.nan  # the whole memory of one row
    said += list(steps)
    rows = collect(said, 4)
    assert isinstance(rows[1].finish, ModelError) and rows[1].ids == theirs(model, PROMPTS[1], 2)
    for place in (0, 2, 3):
        assert rows[place].finish == "length" and rows[place].ids == theirs(model, PROMPTS[place], 8)


def test_time_is_looked_at_between_tokens_and_ends_each_row_for_itself() -> None:
    """Each token costs some time; the row that has none left says one, and the text of both is the beginning of what it would be."""
    model = tiny()

    def slowly(ids: Sequence[int]) -> str:
        time.sleep(0.002 * len(ids))
        return decode(ids)

    decoder, hidden, cache = prefilled(model, PROMPTS[:3])
    configs = [GenerationConfig(max_tokens=200, max_time=limit) for limit in (0.15, 1e-6, 1e6)]
    configs[2] = replace(configs[2], max_tokens=4)
    rows = collect(generate(decoder, hidden, cache, configs, slowly, NO_END), 3)
    assert [row.finish for row in rows] == ["time", "time", "length"] and len(rows[1].ids) == 1 and 4 < len(rows[0].ids) < 200
    assert rows[0].ids == theirs(model, PROMPTS[0], len(rows[0].ids))
    decoder, hidden, cache = prefilled(model, PROMPTS[:1])
    (late,) = collect(generate(decoder, hidden, cache, configs[:1], decode, NO_END, began=time.perf_counter() - 1), 1)
    assert late.finish == "time" and len(late.ids) == 1


def test_configs_must_be_one_a_row() -> None:
    decoder, hidden, cache = prefilled(tiny(), PROMPTS)
    with pytest.raises(InputError, match="1 of them for 4 rows"):
        next(generate(decoder, hidden, cache, [GenerationConfig()], decode, NO_END))
