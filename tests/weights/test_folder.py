"""Folders of checkpoints in the layouts of several years; what is missing, left over or harmful in them is told by name."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmsdk.apps.checkpoints.sight import SightReplica
from mmsdk.errors import ModelError, WeightsError
from mmsdk.families import families, open_model
from mmsdk.prompt import Prompt, Text
from mmsdk.weights.fetch import while_it_lasts
from mmsdk.weights.folder import Folder

CPU = torch.device("cpu")
PROMPT = Prompt((Text("What is two and two?"),))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    SightReplica.write("llava", folder)
    return folder


@pytest.fixture
def copy(llava: Path, tmp_path: Path) -> Path:
    for path in llava.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**found, **values}))


def opened(folder: Path) -> None:
    open_model(str(folder), torch.float32, CPU)


def embedding(folder: Path) -> torch.Tensor:
    model = open_model(str(folder), torch.float32, CPU)
    return model.layout(PROMPT).embed([], model.decoder.embed, CPU)


def test_shards_and_names_of_earlier_years_are_the_same_model(llava: Path, copy: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    SightReplica.write("llava", sharded, shard="100KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    tensors = load_file(copy / "model.safetensors")
    for present, earlier in (
        ("model.vision_tower.", "vision_tower.vision_model."), ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
    ):  # fmt: skip
        tensors = {name.replace(present, earlier) if name.startswith(present) else name: value for name, value in tensors.items()}
    save_file(tensors, copy / "model.safetensors")
    states = [open_model(str(folder), torch.float32, CPU) for folder in (llava, sharded, copy)]
    for model in states[1:]:
        for name, value in states[0].decoder.state_dict().items():
            assert torch.equal(value, model.decoder.state_dict()[name])
        vits = [one.encoder.backbone.vit.state_dict() for one in (states[0], model)]  # type: ignore[attr-defined]  # a family's own
        assert all(torch.equal(value, vits[1][name]) for name, value in vits[0].items())


def test_settings_of_earlier_years_are_read(copy: Path) -> None:
    folder = Folder.of(copy)
    talk, pictures = folder.talk, dict(folder.pictures.values)
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    change(copy / "tokenizer_config.json", chat_template=[{"name": "default", "template": "old"}, {"name": "rag", "template": "other"}])
    assert folder.talk == "old"
    change(copy / "chat_template.json", chat_template=talk)
    assert folder.talk == talk
    change(copy / "processor_config.json", image_processor={**pictures, "size": {"shortest_edge": 7}}, image_token="<picture>")
    assert folder.pictures.group("size").whole("shortest_edge") == 7 and folder.token("image_token", "<image>") == "<picture>"


def test_every_tensor_that_is_missing_or_left_over_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    lost = [name for name in tensors if "layers.1.mlp" in name and "language" in name]
    assert len(lost) == 3
    save_file({name: value for name, value in tensors.items() if name not in lost}, copy / "model.safetensors")
    with pytest.raises(ModelError) as error:
        opened(copy)
    assert all(name in str(error.value) for name in lost)
    for name, told in (
        ("model.sound_tower.x", "no part of this family"),
        (lost[0].replace("mlp", "mlp2"), "no use for"),
        (next(name for name in tensors if "projector" in name) + "2", "the projector has no use for"),
        (next(name for name in tensors if "vision" in name) + "2", "unexpected"),
    ):
        save_file({**tensors, name: torch.zeros(1)}, copy / "model.safetensors")
        with pytest.raises(ModelError, match=told):
            opened(copy)
    wide = next(name for name in tensors if "linear_1.weight" in name)
    save_file({**tensors, wide: torch.zeros(3, 3)}, copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"linear_1\.weight' is \(3, 3\), the projector needs"):
        opened(copy)


def test_a_tensor_that_the_config_does_not_fit_is_named_as_the_checkpoint_names_it(copy: Path) -> None:
    tensors, config = load_file(copy / "model.safetensors"), json.loads((copy / "config.json").read_text())["text_config"]
    words = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    change(copy / "config.json", text_config={**config, "vocab_size": config["vocab_size"] + 100})
    with pytest.raises(ModelError, match=re.escape(f"{copy}: the tensor {words!r} is {tuple(tensors[words].shape)}, the config says")):
        opened(copy)
    change(copy / "config.json", text_config={**config, "num_attention_heads": 2 * config["num_attention_heads"], "head_dim": 16})
    with pytest.raises(
        ModelError, match=rf"^{re.escape(str(copy))}: the tensor '.*q_proj\.weight' with '.*k_proj\.weight', '.*v_proj"
    ) as error:
        opened(copy)
    assert "attention.qkv" not in str(error.value)


def test_code_that_a_checkpoint_names_is_not_looked_at(copy: Path) -> None:
    """A folder whose settings ask for its own code, which would leave a trace."""
    trace = copy / "trace"
    (copy / "modeling_evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Model: ...\n")
    change(copy / "config.json", auto_map={"AutoModel": "modeling_evil.Model", "AutoConfig": "modeling_evil.Model"})
    change(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.Model", None]})
    opened(copy)
    assert not trace.exists()


def test_an_unknown_architecture_says_what_is_supported(copy: Path) -> None:
    change(copy / "config.json", model_type="some_new_model")
    with pytest.raises(ModelError, match="some_new_model") as error:
        opened(copy)
    assert all(name in str(error.value) for name in ("llava_onevision", "qwen2", "smolvlm")) and "language" not in families()
    told = str(error.value).partition("supported: ")[2].split(", ")
    assert "gemma3_text" in told and not {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"} & set(told)
    with pytest.raises(ModelError, match="of a supported family: "):
        open_model("llava", torch.float32, CPU)


def test_progress_is_told_from_the_first_tensor_to_the_last(tmp_path: Path) -> None:
    SightReplica.write("llava", tmp_path, shard="100KB")
    told = list[tuple[str, int]]()

    @contextmanager
    def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
        told.append((title, total))
        yield lambda done: told.append(("", done))

    open_model(str(tmp_path), torch.float32, CPU, progress=progress)
    (title, total), *steps = told
    done = [count for _, count in steps]
    assert title == f"loading {tmp_path}" and len(done) > 20 and done == sorted(done)
    # what no part reads is the vision tower's head alone
    assert (
        0.95 * total
        <= done[-1]
        <= total
        == sum(tensor.nbytes for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values())
    )


def test_a_bar_is_for_terminals_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stderr, shown in ((io.StringIO(), False), (Terminal(), True), (None, False)):
        monkeypatch.setattr("sys.stderr", stderr)
        with while_it_lasts("loading it", 1000) as advance:
            advance(500)
        text = stderr.getvalue() if stderr else ""
        assert ("loading it" in text) == shown
        assert not shown or text.endswith("\r")


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("config.json", {"vision_feature_layer": 9}, "reads the layers"),
        ("config.json", {"vision_feature_layer": 0}, "counted from 1"),
        ("config.json", {"vision_feature_select_strategy": "full"}, "class token"),
        ("config.json", {"projector_hidden_act": "tan"}, "activation 'tan'"),
        ("config.json", {"text_config": {"model_type": "gpt2"}}, "the family 'gpt2' is not supported"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize"),
        ("preprocessor_config.json", {"crop_size": {"height": 23, "width": 24}}, "do not divide into patches"),
        ("preprocessor_config.json", {"crop_size": {"height": 48, "width": 48}}, "patches, its vision tower"),
        ("preprocessor_config.json", {"resample": 17}, "resample"),
        ("preprocessor_config.json", {"image_std": [0.0, 1.0, 1.0]}, "image_std"),
        ("preprocessor_config.json", {"image_mean": "dark"}, "image_mean"),
        ("tokenizer_config.json", {"image_token": "<nothing>"}, "no token '<nothing>'"),
    ],
)
def test_settings_that_cannot_be_are_told(copy: Path, file: str, values: dict[str, Any], told: str) -> None:
    change(copy / file, **values)
    with pytest.raises(ModelError, match=told):
        opened(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_file_that_is_missing_or_damaged_is_told(copy: Path, name: str) -> None:
    (copy / name).write_bytes(b"{")
    with pytest.raises(WeightsError, match="damaged"):
        opened(copy)
    (copy / name).unlink()
    with pytest.raises(WeightsError, match=name):
        opened(copy)


def test_a_checkpoint_without_words_or_end_is_told(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    config["text_config"].pop("eos_token_id")
    config.pop("eos_token_id", None)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="which token ends an answer"):
        opened(copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        opened(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pb_17_weights_come_in_the_dtype_that_is_asked_for(llava: Path, dtype: torch.dtype) -> None:
    """PB-17: every part of it, and the answer's scores are finite."""
    model = open_model(str(llava), dtype, CPU)
    assert {value.dtype for value in model.decoder.state_dict().values()} == {dtype}
    assert model.layout(PROMPT).embed([], model.decoder.embed, CPU).dtype == dtype
    assert embedding(llava).dtype == torch.float32
