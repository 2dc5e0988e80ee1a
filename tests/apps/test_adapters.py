"""Adapters on the command line and over HTTP, asked by OpenAI's own client; the truth is what the pipeline answers with them."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import PIL.Image
import pytest
import torch
from safetensors.torch import save_file

from mmsdk.apps.adapters import adapted
from mmsdk.apps.checkpoints.sight import SightReplica
from mmsdk.apps.cli import main
from mmsdk.apps.serve.server import serving
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.decoder.config import DecoderConfig
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline, pipeline

QUESTION = "What is left of the ball?"


def write(folder: Path, config: DecoderConfig, seed: int, stem: str = "model.") -> Path:
    """A LoRA adapter for queries and the last matrix of each layer, in PEFT's format."""
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    heads = config.heads * config.head_dim
    for layer in range(config.layers):
        for name, outputs, inputs in (("self_attn.q_proj", heads, config.width), ("mlp.down_proj", config.width, config.inner)):
            place = f"base_model.model.{stem}layers.{layer}.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(2, inputs, generator=generator) * 0.3
            tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def served(small: Mini, tmp_path: Path) -> Iterator[tuple[Pipeline, str]]:
    pipe = Pipeline(small)
    adapted(pipe, [f"a={write(tmp_path / 'one', small.decoder.config, 1)}", str(write(tmp_path / "two", small.decoder.config, 2))])
    with serving(Service(pipe, Settings(rows=4))) as url:
        yield pipe, f"{url}/v1"


def test_the_model_of_a_request_chooses_the_adapter(served: tuple[Pipeline, str]) -> None:
    pipe, url = served
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        listed = client.models.list().data
        assert [one.id for one in listed] == ["small", "a", "two"] and client.models.retrieve("two").id == "two"
        assert [one.model_dump().get("parent") for one in listed] == [None, "small", "small"]
        said = set()
        for model, adapter in (("small", ""), ("a", "a"), ("two", "two"), ("small", "")):
            answer = client.chat.completions.create(model=model, max_tokens=12, messages=[{"role": "user", "content": QUESTION}])
            assert answer.model == model
            assert answer.choices[0].message.content == pipe([], QUESTION, max_tokens=12, adapter=adapter)
            said.add(answer.choices[0].message.content)
        assert len(said) == 3
        with pytest.raises(openai.NotFoundError, match="there is no model 'b' here; there is 'small', 'a', 'two'"):
            client.chat.completions.create(model="b", messages=[{"role": "user", "content": QUESTION}])


def test_names_that_cannot_be_are_told(small: Mini, tmp_path: Path) -> None:
    folder, pipe = write(tmp_path / "small", small.decoder.config, 1), Pipeline(small)
    with pytest.raises(InputError, match="two adapters are called 'small'; write NAME=PATH"):
        adapted(pipe, [str(folder), str(folder)])
    # before any of them is read
    assert pipe.adapters.names == () and adapted(pipe, [str(folder)]) == {"small": 1.0}
    with pytest.raises(InputError, match="an adapter and the model have one name"):
        Service(pipe, Settings())


def test_ask_wears_all_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "llava"
    SightReplica.write("llava", folder)
    pipe = pipeline(model=folder, dtype="float32")
    paths = [str(write(tmp_path / name, pipe.vlm.decoder.config, seed, "model.language_model.")) for seed, name in enumerate("ab")]
    PIL.Image.new("RGB", (40, 30), (200, 30, 60)).save(tmp_path / "red.png")
    words = ["ask", str(tmp_path / "red.png"), QUESTION, "--model", str(folder), "--dtype", "float32", "--max-tokens", "12", "--json"]
    capsys.readouterr()
    texts = []
    for flags in ([], ["--adapter", paths[0]], ["--adapter", paths[0], "--adapter", f"other={paths[1]}"]):
        assert main([*words, *flags]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        texts.append(json.loads(out)["text"])
    adapted(pipe, paths)
    media = str(tmp_path / "red.png")
    assert texts == [pipe(media, QUESTION, max_tokens=12, adapter=spec) for spec in ({}, "a", {"a": 1.0, "b": 1.0})]
    assert len(set(texts)) == 3
    assert main([*words, "--adapter", str(tmp_path / "nowhere" / "x")]) == 2
