"""DeepSeek-V4 as a pipeline, from folders that transformers' class wrote: the same words alone, in batches, in pieces, in turns."""

import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from mmsdk.answer import Answer
from mmsdk.apps.cli import main
from mmsdk.decoder.deepseek_v4 import DeepseekV4Decoder
from mmsdk.decoder.quantised import parts_of, quantise, scheme_of
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError, WeightsError
from mmsdk.generate.config import GenerationConfig
from mmsdk.kv.held import HeldMemory
from mmsdk.kv.memory import Shape
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.models.text.deepseek_v4 import read_decoder
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.quant.int4 import Int4
from mmsdk.quant.int8 import Int8
from mmsdk.quant.types import Scheme
from mmsdk.serve.engine import Engine
from mmsdk.stages import Clock, prepare
from mmsdk.vision.types import Image

CSA, HCA, WINDOW, EXPERTS, CHOSEN = 4, 16, 8, 6, 2
KINDS = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
SIZES = {
    "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 20,
    "num_experts_per_tok": CHOSEN, "n_routed_experts": EXPERTS, "layer_types": [*KINDS, KINDS[2]], "hc_mult": 4, "sliding_window": WINDOW,
    "compress_rates": {"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}, "o_groups": 2, "o_lora_rank": 6,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "index_n_heads": 16, "index_head_dim": 8, "index_topk": 5,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 512, "swiglu_limit": 0.5, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TALK = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ["Why?", "What is two and two?", "Tell me of the red ball, of the blue one and of the box that they lie in: which is larger?"]
SAID = 32


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of saving are no part of a test's output."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def words() -> PreTrainedTokenizerFast:
    """A token for each letter of ASCII, so that what is said is read again as it was said."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = Tokenizer(kinds.BPE({split.pre_tokenize_str(letter)[0][0]: place for place, letter in enumerate(string.printable)}, []))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", extra_special_tokens=["<|user|>", "<|assistant|>"])
    tokenizer.chat_template = TALK
    return tokenizer


@dataclass
class Written:
    """A folder, the model of transformers that wrote it, and what that says."""

    folder: Path
    model: Any
    tokenizer: Any

    def ids(self, turns: list[str]) -> torch.Tensor:
        """Of a conversation before its next answer."""
        told = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
        text = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def says(self, *turns: str, tokens: int = SAID) -> str:
        """Greedily, each token from a pass over all that is before it."""
        ids = self.ids(list(turns))
        whole, length = ids, ids.shape[1]
        for _ in range(tokens):
            whole = torch.cat((whole, self.model(whole, use_cache=False).logits[:, -1:].argmax(-1)), 1)
            if whole[0, -1] == self.tokenizer.eos_token_id:
                break
        said: str = self.tokenizer.decode(whole[0, length:], skip_special_tokens=True).lstrip()
        return said


def write(folder: Path, *, shard: str = "50GB", **settings: Any) -> Written:
    tokenizer = words()
    sizes = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **settings}
    model, generator = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes)).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size = 0.7 if name.endswith(("scale", "base", "sinks", "position_bias")) else 0.2
            weight.copy_(torch.randn(weight.shape, generator=generator) * size + ("norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(tokenizer), EXPERTS, generator=generator).argsort(1)[:, :CHOSEN])
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(EXPERTS, generator=generator) * 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return Written(folder, model, tokenizer)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def pipe(written: Written) -> Pipeline:
    return pipeline("image-text-to-text", written.folder, dtype="float32")


@pytest.fixture(scope="module")
def wanted(written: Written) -> list[str]:
    return [written.says(question) for question in QUESTIONS]


def cache_of(pipe: Pipeline, *questions: str, room: int = 1) -> ThreeLevelCache:
    context = prepare(pipe.vlm, pipe.compression, [([], words) for words in questions], room, Clock(torch.device("cpu"))).context
    assert context is not None and isinstance(context.cache, ThreeLevelCache)
    return context.cache


def test_answers_are_those_of_transformers(pipe: Pipeline, written: Written, wanted: list[str]) -> None:
    assert len(set(wanted)) == 3 and min(map(len, wanted)) > 5
    for question, said in zip(QUESTIONS, wanted, strict=True):
        answer = pipe([], question, max_tokens=SAID)
        assert answer == said and answer.tokens.prompt == written.ids([question]).shape[1] and answer.tokens.visual == 0


@pytest.mark.parametrize("together", [2, 16])
def test_pb_07_rows_of_a_batch_answer_as_alone(pipe: Pipeline, wanted: list[str], together: int) -> None:
    """Of three lengths, one shorter than a window; a row that cannot be answered leaves the others alone."""
    other = Pipeline(pipe.vlm, batch_size=together)
    picture = Image(torch.zeros(3, 8, 8, dtype=torch.uint8), "photo.png")
    found = other([([], QUESTIONS[0]), (picture, "What?"), *(([], question) for question in QUESTIONS[1:])], max_tokens=SAID)
    assert [found[0], *found[2:]] == wanted
    assert isinstance(found[1], InputError) and found[1].index == 1


def test_pieces_are_the_answer(pipe: Pipeline, wanted: list[str]) -> None:
    stream = pipe.stream([], QUESTIONS[2], max_tokens=SAID)
    assert "".join(stream) == wanted[2] == stream.answer


def test_the_command_line_asks_without_a_picture(written: Written, wanted: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ask", QUESTIONS[1], "--model", str(written.folder), "--dtype", "float32", "--max-tokens", str(SAID)]
    assert main(words) == 0 and capsys.readouterr().out.strip() == wanted[1].strip()
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["text"] == wanted[1]
    for more, told in ((["--kv", "int8"], "levels"), (["--explain", "a.png"], "no picture")):
        assert main([*words, *more]) == 2 and told in capsys.readouterr().err
    assert main(["ask", QUESTIONS[1]]) == 2 and "no picture or clip was named" in capsys.readouterr().err


def test_several_answers_read_the_prompt_once(pipe: Pipeline) -> None:
    drawn = pipe([], QUESTIONS[1], n=3, max_tokens=12, temperature=1.0, seed=5)
    alone = [pipe([], QUESTIONS[1], max_tokens=12, temperature=1.0, seed=seed) for seed in (5, 6, 7)]
    assert drawn == alone and len(set(drawn)) == 3


@pytest.mark.parametrize("chunk", [1, CSA - 1, CSA, CSA + 1, HCA - 1, HCA, HCA + 1])
def test_ka_23_a_prompt_read_in_parts_is_answered_as_whole(
    pipe: Pipeline, wanted: list[str], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmsdk.decoder.deepseek_v4._PART", chunk)
    found = pipe([([], question) for question in QUESTIONS], max_tokens=6)
    assert all(len(answer) > 3 and said.startswith(answer) for answer, said in zip(found, wanted, strict=True))


@pytest.mark.parametrize("chunk", [3, 256])
def test_the_engine_answers_as_the_pipeline_whoever_comes_and_goes(pipe: Pipeline, wanted: list[str], chunk: int) -> None:
    with Engine(pipe, rows=3, chunk=chunk) as engine:
        first = engine.submit([], "Never mind.", GenerationConfig(max_tokens=SAID))
        said = dict[int, str]()
        numbers = []
        for question in (*QUESTIONS, QUESTIONS[1]):
            numbers.append(engine.submit([], question, GenerationConfig(max_tokens=10)))
            for event in engine.step():
                said[event.number] = said.get(event.number, "") + event.text
        assert engine.held > 0 and engine.cancel(first)
        while engine.busy:
            for event in engine.step():
                said[event.number] = said.get(event.number, "") + event.text
        found = [said[number].lstrip() for number in numbers]
        assert all(len(one) > 5 and whole.startswith(one) for one, whole in zip(found, [*wanted, wanted[1]], strict=True))
        assert engine.held == 0


def test_an_engine_says_what_does_not_fit(pipe: Pipeline) -> None:
    with Engine(pipe, rows=2, tokens=40) as engine:
        numbers = [engine.submit([], question, GenerationConfig(max_tokens=8)) for question in QUESTIONS]
        outcomes = engine.drain()
    assert isinstance(outcomes[numbers[2]].finish, InputError) and outcomes[numbers[1]].finish in ("stop", "length")


def test_turns_read_what_is_new_and_answer_as_the_whole_conversation(pipe: Pipeline, written: Written) -> None:
    """A turn that ends by a stop token goes on from where it ended; whatever is changed goes back to the end of an earlier prompt."""
    chat, told = pipe.chat(config=GenerationConfig(max_tokens=12)), list[str]()
    for question in (*QUESTIONS, "And then?"):
        answer = chat(question)
        told += [question, answer]
        assert answer == written.says(*told[:-1], tokens=12)
        read = written.ids(told[:-1]).shape[1]
        assert answer.tokens.prompt == read and (answer.tokens.recalled > 0) == (len(told) > 2)
        # at least all that the last prompt was
        assert len(told) == 2 or answer.tokens.recalled >= written.ids(told[:-3]).shape[1]
    # in other words: the first two turns are still there
    edited = chat.edit(2, "Tell me of the green one.")
    assert edited == written.says(*told[:4], "Tell me of the green one.", tokens=12)
    assert edited.tokens.recalled >= written.ids(told[:3]).shape[1] > 0
    chat.undo()
    assert chat(QUESTIONS[0]) == written.says(*told[:4], QUESTIONS[0], tokens=12)
    chat.drop(0)
    assert chat("And?") == written.says(*told[2:4], QUESTIONS[0], chat.turns[1].answer, "And?", tokens=12)


def test_a_stream_that_is_left_does_not_show_in_the_next_turn(pipe: Pipeline, written: Written) -> None:
    chat = pipe.chat(config=GenerationConfig(max_tokens=30))
    first = chat(QUESTIONS[1], config=GenerationConfig(max_tokens=6))
    stream = chat.stream(QUESTIONS[2])
    next(stream)
    stream.close()
    answer = chat("And?", config=GenerationConfig(max_tokens=12))
    assert answer == written.says(QUESTIONS[1], first, "And?", tokens=12) and answer.tokens.recalled > 0


def test_a_held_memory_goes_back_to_its_marks_alone(pipe: Pipeline) -> None:
    decoder = pipe.vlm.decoder
    assert isinstance(decoder, DeepseekV4Decoder)
    memory, config = HeldMemory(), decoder.config
    shape = Shape(config.layers, config.kv_heads, config.entry, torch.float32, torch.device("cpu"), config.levels)
    keys = [bytes([place]) for place in range(40)]
    cache, known = memory.begin(shape, [30], [keys[:20]])
    assert isinstance(cache, ThreeLevelCache) and known == [0]
    with torch.no_grad():
        decoder(decoder.embed(torch.arange(20)[None]), torch.arange(20)[None], cache)
        memory.learn(cache, [keys[:20]])
        decoder(decoder.embed(torch.arange(9)[None]), torch.arange(20, 29)[None], cache)
    again, known = memory.begin(shape, [60], [keys[:40]])
    assert again is cache and known == [20] and cache.position.tolist() == [20] and "marks" in cache.levels()
    _, known = memory.begin(shape, [60], [keys[:19]])
    assert known == [0]


def test_bytes_of_levels_are_what_their_tokens_take(pipe: Pipeline, written: Written) -> None:
    length, width, index, room = written.ids([QUESTIONS[2]]).shape[1], 16, 8, 10
    cache = cache_of(pipe, QUESTIONS[2], room=room)
    levels, tokens = cache.levels(), length + room
    assert levels["window"] == 4 * 4 * (WINDOW + 1) * width
    assert (levels["csa"], levels["indexer"]) == (2 * 4 * (tokens // CSA) * width, 2 * 4 * (tokens // CSA) * index)
    assert levels["hca"] == 4 * (tokens // HCA) * width and sum(levels.values()) == cache.nbytes
    assert cache.span == 4 * WINDOW + 4 * (length // CSA) + length // HCA


@pytest.mark.parametrize("kv", ["paged", "int8", "int4", "int2", "fp8", "snapkv:0.5", "streaming:64", "full", "tiered:0.5", "tova:0.5"])
def test_memories_that_do_not_hold_levels_are_refused(kv: str, written: Written) -> None:
    with pytest.raises(InputError, match="kv.*levels.*dense"):
        pipeline("image-text-to-text", written.folder, dtype="float32", kv=kv)


@pytest.mark.parametrize("compress", ["fastv:0.5", "pyramiddrop:0.5", ["uniform:0.5", "proportional"]])
def test_compression_inside_the_decoder_is_refused(compress: str | list[str], pipe: Pipeline) -> None:
    with pytest.raises(InputError, match="compress.*levels"):
        pipe([], QUESTIONS[0], compress=compress)
    with pytest.raises(InputError, match="compress"):
        Engine(pipeline("image-text-to-text", pipe.vlm.name, dtype="float32", compress=compress))
    # in front of the decoder there is nothing to do
    assert pipe([], QUESTIONS[0], max_tokens=SAID, compress="uniform:0.5") == pipe([], QUESTIONS[0], max_tokens=SAID)


def test_streams_without_end_are_refused(pipe: Pipeline) -> None:
    with pytest.raises(ModelError, match="moved to other positions"):
        pipe.stream_session()


def test_too_long_a_conversation_is_told(pipe: Pipeline) -> None:
    with pytest.raises(InputError, match="holds 512"):
        pipe([], "word " * 200)


@pytest.mark.parametrize("settings", [{"shard": "60KB"}, {"tie_word_embeddings": True}])
def test_shards_and_tied_embeddings_answer_as_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    written = write(tmp_path, **settings)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "shard" not in settings
    pipe = pipeline("image-text-to-text", tmp_path, dtype="float32")
    assert pipe([], QUESTIONS[1], max_tokens=SAID) == written.says(QUESTIONS[1])


def test_tensors_that_do_not_fit_are_named(written: Written, tmp_path: Path) -> None:
    names = load_file(written.folder / "model.safetensors")
    for file in written.folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    lost = next(name for name in names if name.endswith("attn_sink"))
    wrong = {
        "lacks the tensor.*attn_sink": {name: tensor for name, tensor in names.items() if name != lost},
        "of no use|no use for": {**names, "layers.0.attn.extra.weight": torch.zeros(1)},
        r"attn_sink|sinks": {**names, lost: torch.zeros(3)},
    }
    for told, tensors in wrong.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=told):
            pipeline("image-text-to-text", tmp_path, dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + bytes(30))
    with pytest.raises(WeightsError):
        pipeline("image-text-to-text", tmp_path, dtype="float32")


def test_settings_that_are_not_run_are_named(written: Written, tmp_path: Path) -> None:
    for file in written.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for wrong, told in [({"quantization_config": block}, "quantization_config"), ({"hidden_act": "relu"}, "hidden_act")]:
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ModelError, match=told):
            pipeline("image-text-to-text", tmp_path, dtype="float32")


def test_half_precision_says_what_it_is(written: Written) -> None:
    pipe = pipeline("image-text-to-text", written.folder, dtype="bfloat16")
    answers = pipe([([], question) for question in QUESTIONS], max_tokens=8)
    assert all(isinstance(answer, Answer) and answer.precision == "bfloat16" for answer in answers)
    cache = cache_of(pipe, QUESTIONS[0])
    assert cache.view(0).keys.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_matrices_in_fewer_bits_are_those_that_their_codes_stand_for(scheme: Scheme, written: Written) -> None:
    """Attention and every expert by itself; what chooses, and what compresses, stays. The same words as with those numbers written out."""
    pipe = pipeline("image-text-to-text", written.folder, dtype="float32", quantize=scheme)
    rounded, wide = pipe.vlm.decoder, read_decoder(written.folder, torch.float32)
    experts = rounded.get_submodule("layers.1.mlp.experts.gate_up")
    assert isinstance(experts, torch.nn.ModuleList) and len(experts) == EXPERTS
    quantise(wide, scheme)
    ids = written.ids([QUESTIONS[2]])
    found = [read(decoder, ids) for decoder in (rounded, wide)]
    assert torch.equal(*found)
    plain = read_decoder(written.folder, torch.float32)
    for name, tensor in list(plain.named_parameters()):
        kind = scheme_of(name, plain.config, scheme)
        if kind != "none":
            parts = tensor.detach().chunk(parts_of(name, plain))
            tensor.data = torch.cat([(Int4.of(part) if kind == "int4" else Int8.of(part)).dequantised() for part in parts])
    names = [name for name, _ in plain.named_parameters() if scheme_of(name, plain.config, scheme) != "none"]
    assert {re.sub(r"layers\.\d+\.", "", name) for name in names} == {
        "head.weight", "attention.q_down.weight", "attention.q_up.weight", "attention.o_up.weight", "mlp.experts.gate_up",
        "mlp.experts.down", "mlp.shared.gate_up.weight", "mlp.shared.down.weight",
    }  # fmt: skip
    # a few rows of an expert go through kernels that take bfloat16
    exact, apart = read(plain, ids), found[0] - read(plain, ids)
    assert apart.square().mean().sqrt() < 0.05 * exact.std()
    answer = pipe([], QUESTIONS[1], max_tokens=4)
    assert answer.precision == f"{scheme}/float32"


@torch.no_grad()
def read(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    assert isinstance(decoder, DeepseekV4Decoder)
    return decoder.logits(decoder(decoder.embed(ids), torch.arange(ids.shape[1])[None], decoder.memory(1, ids.shape[1])))
