"""DeepSeek-V3.2 under policies of the memory: every door says what is said alone, and with room for everything what transformers says."""

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.types import VLM
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.recall import recalling
from mmsdk.serve.engine import Engine

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 512, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 7, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TALK = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
# what the template makes of a first question
FIRST = "u:{}\na:"
# shorter than what is held, a little shorter, and longer
QUESTIONS = ["Why?", "What is two and four?", "Of the red ball and the blue one: which is larger?"]
SAID = 6
EVICTING = ["h2o", "tova", "snapkv", "random", "window"]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of saving are no part of a test's output."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DeepseekV32ForCausalLM, PreTrainedTokenizerFast]:
    """A folder, the model of transformers that wrote it, and a token for each letter of ASCII."""
    folder = tmp_path_factory.mktemp("v32")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = Tokenizer(kinds.BPE({split.pre_tokenize_str(letter)[0][0]: place for place, letter in enumerate(string.printable)}, []))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    words.chat_template = TALK
    config = DeepseekV32Config(**SIZES, vocab_size=len(words), eos_token_id=words.eos_token_id)
    model, generator = DeepseekV32ForCausalLM(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + ("norm" in name and name.endswith("weight")))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder, model, words


@pytest.fixture(scope="module")
def vlm(written: tuple[Path, DeepseekV32ForCausalLM, PreTrainedTokenizerFast]) -> VLM:
    return pipeline("image-text-to-text", written[0], dtype="float32").vlm


def opened(vlm: VLM, kv: str) -> Pipeline:
    return Pipeline(vlm, recall=recalling(kv))


@pytest.fixture(scope="module")
def exact(vlm: VLM) -> list[tuple[int, ...]]:
    """What is said where everything is held."""
    return [opened(vlm, "dense")([], question, max_tokens=SAID).ids for question in QUESTIONS]


@torch.no_grad()
def test_what_holds_everything_says_what_transformers_says(
    vlm: VLM, written: tuple[Path, DeepseekV32ForCausalLM, PreTrainedTokenizerFast], exact: list[tuple[int, ...]]
) -> None:
    _, model, words = written
    for question, said in zip(QUESTIONS, exact, strict=True):
        ids = whole = words(FIRST.format(question), return_tensors="pt", add_special_tokens=False)["input_ids"]
        for _ in range(SAID):
            whole = torch.cat((whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        assert said == tuple(whole[0, ids.shape[1] :].tolist())[: len(said)] and len(said) > SAID // 2
        for kv in ("full", "paged", *(f"{name}:400" for name in EVICTING)):
            assert opened(vlm, kv)([], question, max_tokens=SAID).ids == said, kv


@pytest.mark.parametrize("kv", ["h2o:0.5", "tova:0.5", "snapkv:0.5", "random:0.5", "h2o:28,interval=2"])
def test_every_door_says_the_same(vlm: VLM, exact: list[tuple[int, ...]], kv: str) -> None:
    """Alone, in a batch of three lengths, in pieces, as a conversation, and in the engine, where all are read together with others."""
    pipe, config = opened(vlm, kv), GenerationConfig(max_tokens=SAID)
    alone = [pipe([], question, max_tokens=SAID).ids for question in QUESTIONS]
    assert alone != exact
    assert [answer.ids for answer in pipe([([], question) for question in QUESTIONS], max_tokens=SAID)] == alone
    stream = pipe.stream([], QUESTIONS[2], max_tokens=SAID)
    assert list(stream) and stream.answer.ids == alone[2]
    with Engine(pipe, rows=2, chunk=5) as engine:
        numbers = [engine.submit([], question, config) for question in QUESTIONS]
        outcomes = engine.drain()
    assert [tuple(outcomes[number].ids) for number in numbers] == alone
    chat, changed = pipe.chat(config=config), pipe.chat(config=config)
    told = [chat(question).ids for question in QUESTIONS[:2]]
    changed("Never mind.")
    assert told[0] == alone[0] and [changed.edit(0, QUESTIONS[0]).ids, changed(QUESTIONS[1]).ids] == told


def test_what_moves_or_rounds_the_indexers_keys_is_refused_by_name(vlm: VLM) -> None:
    for kv, told in (("streaming:24", "choose window"), ("quest:0.5", "choose one of"), ("int4", "choose dense or paged")):
        with pytest.raises((InputError, ModelError), match=told):
            opened(vlm, kv)([], QUESTIONS[0], max_tokens=4)
    with pytest.raises(ModelError, match="cannot be moved"):
        opened(vlm, "dense").stream_session("h2o:24")
