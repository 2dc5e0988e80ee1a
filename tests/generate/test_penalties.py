"""Penalties against transformers' processor, against OpenAI's formula written out, and what they leave alone."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import Generated, collect, generate
from mmsdk.generate.penalties import Penalties
from mmsdk.generate.sampling import Sampler
from mmsdk.kv.dense import DenseCache

CPU, V = torch.device("cpu"), 50
PROMPTS: list[list[int]] = [[3, 3, 7, 49], [], [0, 1, 2, 3, 4, 5]]
SAID: list[list[int]] = [[7, 8, 8], [3, 3, 3], [9, 0, 9]]


def scores(rows: int, seed: int = 0) -> Tensor:
    """Of both signs, with a zero and a word that cannot be."""
    found = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3
    found[:, 3], found[:, 8] = 0.0, -torch.inf
    return found


def after(configs: Sequence[GenerationConfig], prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> Penalties:
    penalties = Penalties.of(configs, prompts, V, CPU)
    for step in zip(*said, strict=True):
        penalties.count(torch.tensor(step))
    return penalties


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_that_of_transformers_over_prompt_and_answer(penalty: float) -> None:
    ours = after([GenerationConfig(repetition_penalty=penalty)] * 3, PROMPTS, SAID)(scores(3))
    for row, (prompt, said) in enumerate(zip(PROMPTS, SAID, strict=True)):
        ids = torch.tensor([[*prompt, *said]])
        assert torch.equal(ours[row], RepetitionPenaltyLogitsProcessor(penalty)(ids, scores(3)[row : row + 1])[0])


def written_out(row: Tensor, said: Sequence[int], config: GenerationConfig) -> Tensor:
    """OpenAI's: mu[j] - c[j] * frequency - float(c[j] > 0) * presence."""
    return torch.stack(
        [s - said.count(j) * config.frequency_penalty - float(said.count(j) > 0) * config.presence_penalty for j, s in enumerate(row)]
    )


def test_presence_and_frequency_count_what_was_said_and_not_the_prompt() -> None:
    configs = [GenerationConfig(presence_penalty=p, frequency_penalty=f) for p, f in ((0.5, 0.0), (0.0, 1.5), (-2.0, 0.25))]
    ours = after(configs, PROMPTS, SAID)(scores(3))
    for row, (said, config) in enumerate(zip(SAID, configs, strict=True)):
        torch.testing.assert_close(ours[row], written_out(scores(3)[row], said, config))


def test_a_row_without_penalties_keeps_its_scores_beside_rows_with_them() -> None:
    configs = [GenerationConfig(repetition_penalty=2.0), GenerationConfig(), GenerationConfig(frequency_penalty=1.0)]
    penalties = after(configs, PROMPTS, SAID)
    found = penalties(scores(3))
    assert torch.equal(found[1], scores(3)[1]) and not torch.equal(found[0], scores(3)[0])
    rows = torch.tensor([2, 0])
    assert torch.equal(penalties.select(rows)(scores(3)[rows]), found[rows])


def test_ids_that_a_checkpoint_embeds_and_cannot_say_are_passed_over() -> None:
    configs = [GenerationConfig(repetition_penalty=2.0)]
    assert torch.equal(Penalties.of(configs, [[5, V, V + 9]], V, CPU)(scores(1)), Penalties.of(configs, [[5]], V, CPU)(scores(1)))


def test_greedy_answers_without_penalties_cost_what_they_did() -> None:
    """Nothing of the vocabulary's size is made, and the scores are looked at as they are."""
    sampler = Sampler.of([GenerationConfig(), GenerationConfig(seed=5)], CPU, V, PROMPTS[:2])
    assert sampler.penalties == () and sampler.generators == ()


def tiny() -> tuple[LlamaForCausalLM, Decoder]:
    """A real llama at a tiny size, prone to repeat itself, and the same weights in our decoder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, **sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.3)).eval()
    config = DecoderConfig(vocabulary=V, width=32, layers=1, heads=4, kv_heads=4, head_dim=8, inner=64, context=64, norm_eps=1e-6)
    (layer,) = model.model.layers
    a, m = layer.self_attn, layer.mlp
    state = {
        "embedding.weight": model.model.embed_tokens.weight,
        "head.weight": model.lm_head.weight,
        "norm.weight": model.model.norm.weight,
        "layers.0.attention.qkv.weight": torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
        "layers.0.attention.o.weight": a.o_proj.weight,
        "layers.0.mlp.gate_up.weight": torch.cat([m.gate_proj.weight, m.up_proj.weight]),
        "layers.0.mlp.down.weight": m.down_proj.weight,
        "layers.0.norm1.weight": layer.input_layernorm.weight,
        "layers.0.norm2.weight": layer.post_attention_layernorm.weight,
    }
    return model, Decoder.of(config, {name: tensor.detach() for name, tensor in state.items()})


def run(decoder: Decoder, prompts: Sequence[Sequence[int]], configs: Sequence[GenerationConfig]) -> list[Generated]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    positions = torch.tensor([[-1] * (longest - len(prompt)) + list(range(len(prompt))) for prompt in prompts])
    cache = DenseCache.allocate(1, len(prompts), 4, 8, longest + 8, torch.float32, "cpu")
    with torch.no_grad():
        hidden = decoder(decoder.embed(ids), positions, cache)[:, -1]
    return collect(generate(decoder, hidden, cache, configs, str, frozenset(), prompts), len(prompts))


def test_whole_answers_are_those_of_transformers_generate_in_a_batch_whose_rows_end_early() -> None:
    model, decoder = tiny()
    prompts, factors = [[5, 9, 20], [17], [3, 1, 4, 1, 5]], [1.5, 1.2, 1.0]
    configs = [GenerationConfig(max_tokens=n, repetition_penalty=factor) for n, factor in zip((4, 24, 24), factors, strict=True)]
    ours = run(decoder, prompts, configs)
    for prompt, config, row in zip(prompts, configs, ours, strict=True):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": config.max_tokens, "do_sample": False, "pad_token_id": 0}
        told = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=config.repetition_penalty, **settings)
        assert row.ids == tuple(told[0, len(prompt) :].tolist())
    assert len(set(ours[1].ids)) > len(set(run(decoder, [prompts[1]], [GenerationConfig(max_tokens=24)])[0].ids))


def test_pb_14_a_seed_with_penalties_draws_the_same_in_any_company() -> None:
    _, decoder = tiny()
    mine = GenerationConfig(max_tokens=16, temperature=1.0, seed=7, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)
    strangers = [GenerationConfig(max_tokens=3), replace(mine, max_tokens=5, seed=1, top_k=5), GenerationConfig(max_tokens=20, seed=2)]
    (alone,) = run(decoder, [[5, 9]], [mine])
    assert run(decoder, [[1], [2, 3], [5, 9], [4]], [*strangers[:2], mine, strangers[2]])[2] == alone
