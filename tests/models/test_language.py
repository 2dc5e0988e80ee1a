"""Language models alone as pipelines: asked by their own chat template or as they are, without pictures, as transformers asks them."""

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mmsdk.errors import InputError
from mmsdk.families import open_model
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.vision.types import Image

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")
TALK = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = "What is two and two?"


def write(family: str, folder: Path, talk: str) -> tuple[Any, Any]:
    letters = {letter: place for place, letter in enumerate(sorted(set(string.printable) | set(pre_tokenizers.ByteLevel.alphabet())))}
    backend = Tokenizer(kinds.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", extra_special_tokens=["<|user|>", "<|assistant|>"])
    tokenizer.chat_template = talk or None
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None, "pad_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    if family == "gemma3_text":
        sizes |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 12}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2, generator=generator).add_(float("norm" in name))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("talk", [TALK, ""])
def test_answers_are_those_of_transformers(family: str, talk: str, tmp_path: Path) -> None:
    model, tokenizer = write(family, tmp_path, talk)
    pipe = pipeline("image-text-to-text", tmp_path, dtype="float32")
    text = QUESTION
    if talk:
        text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not talk)["input_ids"]
    with torch.no_grad():
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    answer = pipe([], QUESTION, max_tokens=24)
    assert answer.tokens.prompt == ids.shape[1] and answer.tokens.visual == 0
    assert answer == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).lstrip()
    assert pipe([], QUESTION, max_tokens=24, compress="uniform:0.5") == answer


# PEFT asks transformers in words that transformers is giving up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_worn_without_sight_too(tmp_path: Path) -> None:
    model, tokenizer = write("llama", tmp_path / "base", "")
    pipe = pipeline("image-text-to-text", tmp_path / "base", dtype="float32")
    plain = pipe([], QUESTION, max_tokens=12)
    adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"])).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.4, generator=generator)
    adapted.save_pretrained(tmp_path / "style")
    pipe.load_adapter(tmp_path / "style", "style")
    ids = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    said = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).lstrip()
    assert pipe([], QUESTION, max_tokens=12, adapter="style") == said != plain == pipe([], QUESTION, max_tokens=12)


def test_a_picture_is_refused_and_leaves_the_others_alone(tmp_path: Path) -> None:
    write("llama", tmp_path, TALK)
    pipe = Pipeline(open_model(str(tmp_path), torch.float32, torch.device("cpu")))
    picture = Image(torch.zeros(3, 8, 8, dtype=torch.uint8), "photo.png")
    with pytest.raises(InputError, match=r"photo\.png.*reads text only"):
        pipe(picture, QUESTION)
    first, second, third = pipe([([], QUESTION), (picture, QUESTION), ([], "And three?")], max_tokens=4)
    assert isinstance(second, InputError) and second.index == 1
    assert (first, third) == (pipe([], QUESTION, max_tokens=4), pipe([], "And three?", max_tokens=4))
