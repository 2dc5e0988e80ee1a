"""A language model alone by its GGUF file: words, tokenizer and ends of answers are the file's, as transformers reads the same file."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mmsdk.errors import ModelError
from mmsdk.families import open_model
from mmsdk.models.language import Blind
from mmsdk.pipeline import pipeline
from mmsdk.prompt import Ids, Prompt, Text, Turn
from mmsdk.weights.gguf_talk import talk_in

CPU = torch.device("cpu")
WORDS = ["a", "b", "ab", "Ġ", "<s>", "</s>", "<end>"]


def tiny(path: Path, *, talk: str = "", bos: bool = False, ends: bool = True, architecture: str = "llama") -> Path:
    """A file of one layer, eight wide, whose vocabulary is seven tokens."""
    writer, generator = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1, 1, 1, 1, 3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(4)
    writer.add_add_bos_token(bos)
    if ends:
        writer.add_eos_token_id(5)
        writer.add_eot_token_id(6)
    if talk:
        writer.add_chat_template(talk)
    shapes = {"token_embd": (7, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids(path: Path, *turns: Turn) -> list[int]:
    """What the model is told of a conversation."""
    layout = open_model(str(path), torch.float32, CPU).layout(Prompt.talk(list(turns)))
    return [number for span in layout.spans for number in (span.ids if isinstance(span, Ids) else ())]


def user(words: str) -> Turn:
    return Turn("user", (Text(words),))


def test_a_real_file_is_told_a_conversation_as_transformers_tells_it(mini_language: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(mini_language.parent, gguf_file=mini_language.name)
    turns = [Turn("system", (Text("Be brief."),)), user("What is 2 + 2?"), Turn("assistant", (Text("Four."),))]
    pipe = pipeline(model=str(mini_language), quantize="int4")
    layout = pipe.vlm.layout(Prompt.talk([*turns[:3], user("And 3?")]))
    said = [{"role": turn.role, "content": turn.text} for turn in turns[:3]] + [{"role": "user", "content": "And 3?"}]
    expected = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert [number for span in layout.spans for number in (span.ids if isinstance(span, Ids) else ())] == list(expected)
    assert pipe.vlm.stop_ids == {theirs.eos_token_id} and isinstance(pipe.vlm.encoder, Blind)
    answer = pipe([], "What is the capital of France? Say one word.", max_tokens=12)
    assert "Paris" in answer and answer.finish == "stop"


def test_a_base_model_goes_on_with_what_it_is_given(tmp_path: Path) -> None:
    assert ids(tiny(tmp_path / "plain.gguf"), user("ab")) == [2]
    assert ids(tiny(tmp_path / "bos.gguf", bos=True), user("ab")) == [4, 2]


def test_the_files_template_and_ends_are_taken(tmp_path: Path) -> None:
    talk = "{{ bos_token }}{% for one in messages %}{{ one['content'] + eos_token }}{% endfor %}"
    path = tiny(tmp_path / "talk.gguf", talk=talk, bos=True)
    assert ids(path, user("ab")) == [4, 2, 5]
    assert talk_in(path).stop_ids == {5, 6}
    answer = pipeline(model=str(path), dtype="float32")([], "ab", max_tokens=4)
    assert answer.tokens.prompt == 3


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"ends": False}, r"which token ends an answer.*gguf_file="),
        ({"architecture": "bert"}, r"architecture 'bert'; supported: llama, qwen2, qwen3; .*gguf_file="),
    ],
)
def test_a_file_that_is_no_such_model_is_told_with_the_other_way(made: dict[str, bool], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=told):
        pipeline(model=str(tiny(tmp_path / "model.gguf", **made)))


def test_what_has_to_lie_beside_a_file_is_told(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    with pytest.raises(
        ModelError, match=r"no config\.json: put config\.json, tokenizer\.json .* beside it.*; or name the file itself.*m\.gguf"
    ):
        pipeline(model=str(tmp_path), gguf_file="m.gguf")
    with pytest.raises(ModelError, match="is a GGUF file itself"):
        pipeline(model=str(path), gguf_file="other.gguf")
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"no model")
    with pytest.raises(ModelError, match="is a file, and no GGUF file; name the folder"):
        pipeline(model=str(other))
    with pytest.raises(ModelError, match=r"there is no file 'missing\.gguf'"):
        pipeline(model="missing.gguf")
    with pytest.raises(ModelError, match="GGUF file of a language model"):
        pipeline(model="missing")
