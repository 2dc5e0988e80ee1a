"""What `mmsdk.pipeline` refuses before any weights are read: models, tasks, dtypes and devices that are not there, each by its name."""

import re
from pathlib import Path

import jaxtyping
import pytest
import torch

import mmsdk
from mmsdk.errors import MmsdkError, ModelError


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
        ({"device": "toaster"}, "toaster"),
        ({"device": "meta"}, "meta"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": None}, "device None"),
        ({"device": 10**30}, "device 1000"),
        ({"device": ["cpu"]}, "device ..cpu"),
        ({"dtype": None}, "dtype None"),
        ({"dtype": ["float32"]}, "float32.. is not known"),
        ({"quantize": None}, "quantize None"),
        ({"model": None}, "model None is no name"),
        ({"model": ""}, "model '' is no name"),
        ({"model": " "}, "is no name"),
        ({"model": b"mini"}, "is no name"),
        ({"model": 5}, "model 5 is no name"),
        ({"batch_size": None}, "batch_size is None"),
        ({"batch_size": "16"}, "batch_size is '16'"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 0}, "batch_size is 0"),
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
