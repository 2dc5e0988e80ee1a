"""What a prefill takes on this machine: the curve, and what is kept of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError, WeightsError
from mmsdk.kv.memory import PagedMemory, RoundedMemory, memory_of
from mmsdk.kv.types import KVCache
from mmsdk.latency import Latency, latency_file, latency_of, measure
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of


@pytest.fixture(scope="module")
def vlm(mini_language: Path) -> Mini:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=1, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 64}
    decoder = Decoder(DecoderConfig(vocabulary=64, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    return Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=64)


@pytest.mark.parametrize(
    ("lengths", "ms", "length", "expected"),
    [
        ((10, 100), (5.0, 50.0), 5, 5.0),
        ((10, 100), (5.0, 50.0), 55, 27.5),
        ((10, 100), (5.0, 50.0), 200, 100.0),
        ((100, 200), (10.0, 40.0), 400, 160.0),
        ((100, 200), (10.0, 80.0), 400, 320.0),
        ((100, 200), (10.0, 10.0), 400, 20.0),
    ],
    ids=["below", "between", "linear", "square", "never more than square", "never less than linear"],
)
def test_the_curve_between_and_beyond_what_was_measured(
    lengths: tuple[int, ...], ms: tuple[float, ...], length: int, expected: float
) -> None:
    assert Latency(lengths, ms)(length) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lengths", "ms"), [((10,), (1.0,)), ((10, 10), (1.0, 2.0)), ((10, 20), (2.0, 1.0)), ((10, 20), (0.0, 1.0)), ((10, 20), (1.0,))]
)
def test_a_curve_that_falls_is_none(lengths: tuple[int, ...], ms: tuple[float, ...]) -> None:
    with pytest.raises(ModelError, match="no latency model"):
        Latency(lengths, ms)


def test_measuring_goes_up_to_the_models_context(vlm: Mini) -> None:
    latency = measure(vlm)
    # on a machine that is very busy the longest may be left out
    assert latency.lengths in {(8, 32), (8, 32, 64)} and latency.ms[0] > 0


def test_it_is_measured_once_and_again_where_what_is_kept_is_damaged(vlm: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    first, file = latency_of(vlm), latency_file(vlm)
    written = file.read_bytes()
    assert latency_of(vlm) == first and file.read_bytes() == written and file.is_relative_to(tmp_path)
    told = json.loads(written)
    file.write_text(json.dumps(told | {"lengths": [8, 32], "ms": [1.0, 2.0]}))
    assert latency_of(vlm) == Latency((8, 32), (1.0, 2.0))
    for damage in ("{", "[]", json.dumps(told | {"lengths": [8, 32], "ms": [2.0, 1.0]}), json.dumps(told | {"key": {}})):
        file.write_text(damage)
        assert latency_of(vlm).lengths[:2] == (8, 32) and json.loads(file.read_text())["key"] == told["key"]
    assert not list(tmp_path.rglob("*.new"))


def test_another_model_dtype_or_number_of_threads_has_its_own(vlm: Mini) -> None:
    half = replace(vlm, decoder=Decoder(vlm.decoder.config).to(torch.bfloat16))
    files = {latency_file(vlm), latency_file(replace(vlm, name="other")), latency_file(half)}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        files.add(latency_file(vlm))
    finally:
        torch.set_num_threads(threads)
    assert len(files) == 4


def test_each_kind_of_memory_has_its_own_and_is_what_is_measured(vlm: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool holds is no part of its kind, and measuring leaves a pool as it was."""
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    kinds = ("dense", "paged", "int8", "int4", "snapkv:0.25", "snapkv:0.5", "window:16")
    assert len({latency_file(vlm, memory_of(kind)) for kind in kinds}) == len(kinds)
    assert latency_file(vlm) == latency_file(vlm, memory_of("dense"))
    assert latency_file(vlm, memory_of("paged")) == latency_file(vlm, memory_of("paged"))
    read, learn = list[int](), RoundedMemory.learn

    def noted(memory: RoundedMemory, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        read.append(int(cache.position[0]))
        learn(memory, cache, keys)

    monkeypatch.setattr(RoundedMemory, "learn", noted)
    pool = PagedMemory()
    for memory in (memory_of("int8"), pool, memory_of("snapkv:0.25")):
        assert latency_of(vlm, memory) == latency_of(vlm, memory) and latency_file(vlm, memory).is_file()
    assert set(read) in ({8, 32}, {8, 32, 64}) and pool.held == 0 and not pool._pools
    assert not latency_file(vlm).exists()


def test_a_cache_that_cannot_be_written_is_named(vlm: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="MMSDK_CACHE"):
        latency_of(vlm)
