"""What `mmsdk.pipeline` refuses before any weights are read: models, tasks, dtypes and devices that are not there, each by its name."""

import re
import sys
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

import mmsdk
from mmsdk.errors import MmsdkError, ModelError, PluginError
from mmsdk.kv.memory import DenseMemory
from mmsdk.models.mini.family import Mini
from mmsdk.precision import resolve_dtype


def test_unknown_models_list_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean 'mini'"):
        mmsdk.pipeline(model="minni")
    with pytest.raises(ModelError, match=re.escape("known by name: mini")):
        mmsdk.pipeline(model="gigantic")
    (tmp_path / "config.json").write_text('{"model_type": "fuyu"}')
    with pytest.raises(ModelError, match="'fuyu'.*supported: mini"):
        mmsdk.pipeline(model=str(tmp_path))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match="no valid"):
        mmsdk.pipeline(model=str(tmp_path))
    (tmp_path / "config.json").unlink()
    for folder in (tmp_path, str(tmp_path)):
        with pytest.raises(ModelError, match=r"config\.json"):
            mmsdk.pipeline(model=folder)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"task": "text-to-speech"}, "image-text-to-text"),
        ({"task": "mini"}, "a model goes behind it"),
        ({"dtype": "float31"}, "float32"),
        ({"dtype": torch.int8}, "torch.int8; choose auto, float32"),
        ({"device": "toaster"}, "^device: 'toaster' is no device; this machine has cpu.*\"cuda:1\""),
        ({"device": "meta"}, "^device: torch sees no 'meta' here; this machine has cpu"),
        ({"device": "cuda:99"}, "^device: torch sees no 'cuda:99' here; this machine has cpu"),
        ({"device": "cpu:1"}, "^device: torch sees no 'cpu:1' here"),
        ({"device": 5}, "^device: 5 is no device; this machine has cpu"),
        ({"device": 10**30}, "^device: 1000.* is no device"),
        ({"device": ["cpu"]}, "^device: ..cpu.. is no device"),
        ({"dtype": 5}, "dtype 5 is not known; choose auto, float32"),
        # "==" of an array is one more array
        ({"dtype": np.zeros(2)}, r"dtype array\(\[0., 0.\]\) is not known; choose auto, float32"),
        ({"quantize": np.zeros(2)}, r"quantize array\(\[0., 0.\]\) is not known; choose none, int4"),
        ({"compress": np.zeros(2)}, r"array\(\[0., 0.\]\) names no method"),
        ({"dtype": ["float32"]}, "float32.. is not known"),
        ({"quantize": 4}, "quantize 4 is not known; choose none, int4"),
        ({"quantize": "int3"}, "quantize 'int3' is not known"),
        ({"kv": 7}, "^kv: 7 names no memory; write a name, such as"),
        ({"kv": ["paged"]}, "^kv: ..paged.. names no memory"),
        ({"kv": "snapvk:0.5"}, "^kv: 'snapvk:0.5' is not known; did you mean 'snapkv'. choose dense, paged"),
        ({"kv": ""}, "^kv: '' is not known"),
        ({"gguf_file": 5}, "^gguf_file: 5 is no file"),
        ({"model": None}, "model None is no name"),
        ({"model": ""}, "model '' is no name"),
        ({"model": " "}, "is no name"),
        ({"model": b"mini"}, "is no name"),
        ({"model": 5}, "model 5 is no name"),
        ({"batch_size": None}, "^batch_size: it is None"),
        ({"batch_size": "16"}, "^batch_size: it is '16'"),
        ({"batch_size": 2.5}, "^batch_size: it is 2.5"),
        ({"batch_size": True}, "^batch_size: it is True"),
        ({"batch_size": 0}, "^batch_size: it is 0"),
        ({"compress": 5}, "5 names no method"),
    ],
    ids=str,
)
def test_impossible_pipelines_are_refused_before_weights_are_read(
    options: dict[str, object], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(MmsdkError, match=hint):
        mmsdk.pipeline(**options)  # type: ignore[arg-type]  # the mistakes under test


@pytest.mark.parametrize("wrong", ["unifrom:64", 5])
def test_the_same_mistake_is_the_same_error_in_compress_and_in_kv(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for option in ("compress", "kv"):
        with pytest.raises(PluginError):
            mmsdk.pipeline(**{option: wrong})  # type: ignore[arg-type]  # the mistake under test


def test_none_in_the_place_of_a_name_is_its_default(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(sys.modules[mmsdk.pipeline.__module__], "open_model", lambda *given: asked.append(given[:5]) or small)
    pipe = mmsdk.pipeline(compress=None, dtype=None, device=None, quantize=None, kv=None, gguf_file=None)
    mmsdk.pipeline()
    cpu = torch.device("cpu")
    assert asked == [("mini", resolve_dtype("auto", cpu), cpu, "none", "")] * 2
    assert pipe.compression.steps[0].amount == 1.0 and isinstance(pipe.recall.memory, DenseMemory)
    assert pipe([], "What?", max_tokens=2, stop=None, adapter=None, compress=None) == pipe([], "What?", max_tokens=2)
    assert pipe.chat(None, None)("What?", config=mmsdk.GenerationConfig(max_tokens=2)) == pipe([], "What?", max_tokens=2)
    assert pipe.stream_session(None).held == pipe.stream_session().held


def test_a_gpu_that_is_not_there_is_told_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(mmsdk.InputError, match="torch sees no 'cuda:2' here; this machine has cpu, cuda, .*cuda:0, cuda:1; a device"):
        mmsdk.pipeline(device="cuda:2")
