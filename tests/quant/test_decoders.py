"""Decoders in fewer bits: against the same decoder on numbers that other software reads back, and within the error of the format."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import LlamaForCausalLM

from mmsdk.apps.cli import main
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.native import hasten
from mmsdk.decoder.quantised import precision, quantise
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.kernels._triton import triton
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache
from mmsdk.models.mini.adapter import changed, merge, read_adapter
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.text import load_decoder, read_decoder
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.precision import resolve_quantize
from mmsdk.quant.int4 import Int4, Int4Linear
from mmsdk.quant.int8 import Int8, Int8Linear
from mmsdk.quant.types import Scheme
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf import open_gguf, read_gguf
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of
from mmsdk.weights.quantised import gguf_decoder

Small = Callable[[bool], LlamaForCausalLM]
Written = Callable[[LlamaForCausalLM, Kind], Path]
SCHEMES: tuple[Scheme, ...] = ("int4", "int8")
IDS = torch.randint(0, 260, (3, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(decoder: Decoder, ids: Tensor = IDS) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return decoder.logits(decoder(decoder.embed(ids), positions, NoCache()))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def numbers(state: dict[str, Tensor], scheme: Scheme, tied: bool) -> dict[str, Tensor]:
    """The state of a wide decoder that holds what the codes stand for."""

    def rounded(name: str, tensor: Tensor) -> Tensor:
        vocabulary = name == ("embedding.weight" if tied else "head.weight")
        if vocabulary or (scheme == "int8" and tensor.ndim == 2 and name.startswith("layers")):
            return Int8.of(tensor).dequantised()
        return Int4.of(tensor).dequantised() if tensor.ndim == 2 and name.startswith("layers") else tensor

    return {name: rounded(name, tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "a head of its own"])
def test_a_folder_is_read_into_fewer_bits(scheme: Scheme, tied: bool, small: Small, tmp_path: Path) -> None:
    small(tied).save_pretrained(tmp_path)
    wide, decoder = read_decoder(tmp_path, torch.float32), read_decoder(tmp_path, torch.float32, scheme)
    exact = Decoder.of(wide.config, numbers(wide.state_dict(), scheme, tied))
    assert precision(wide) == "float32" and precision(decoder) == f"{scheme}/float32"
    # the kernels take x in bfloat16; ten roundings of that lie on a path of two layers
    assert distance(logits(decoder), logits(exact)) < 0.02
    assert distance(logits(decoder, IDS.repeat(3, 1)[:, :16]), logits(exact, IDS.repeat(3, 1)[:, :16])) < 0.02
    # the format's own error: a sixteenth of a group's range is a fifth of its deviation
    assert 0.001 < distance(logits(decoder), logits(wide)) < (0.35 if scheme == "int4" else 0.04)
    kind = Int4Linear if scheme == "int4" else Int8Linear
    for layer in decoder.layers:
        assert all(type(m) is kind for m in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down))
    assert isinstance(decoder.head, Int8Linear)
    assert {name for name, _ in decoder.named_parameters()} == {
        name for name in wide.state_dict() if "norm" in name or (name == "embedding.weight" and not tied)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantising_a_decoder_in_place_is_reading_it_so(dtype: torch.dtype, small: Small, tmp_path: Path) -> None:
    small(True).save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path, torch.float32)
    quantise(decoder, "int4")
    # the norms are cast before or after, the same; what is read goes through C++ where that can be, which rounds less often
    hasten(decoder.to(dtype))
    assert torch.equal(logits(decoder), logits(read_decoder(tmp_path, dtype, "int4")))
    assert precision(decoder) == f"int4/{str(dtype).removeprefix('torch.')}"


def test_both_ends_of_a_tied_decoder_stand_on_the_same_bytes(small: Small, tmp_path: Path) -> None:
    small(True).save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path, torch.bfloat16, "int4")
    table = decoder.embedding.get_submodule("table")
    assert table is decoder.head and decoder.embed(IDS).dtype == torch.bfloat16
    size = sum(buffer.nbytes for buffer in decoder.buffers()) + sum(p.nbytes for p in decoder.parameters())
    wide = sum(p.nbytes for p in read_decoder(tmp_path, torch.bfloat16).parameters())
    assert size < 0.4 * wide


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_four_bit_blocks_of_a_gguf_file_become_int4_without_being_read_as_numbers(kind: Kind, small: Small, written: Written) -> None:
    path = written(small(True), kind)
    config, state, _ = read_gguf(path, torch.float32)
    decoder, tokenizer = load_decoder(path, torch.float32, "int4")
    _, source, _ = open_gguf(path)
    for ours, theirs in {"attention.qkv": ("attn_q", "attn_k", "attn_v"), "mlp.down": ("ffn_down",)}.items():
        stored = [source.int4(f"blk.1.{name}.weight") for name in theirs]
        parts = [part for part in stored if part is not None]
        assert len(parts) == len(theirs)
        # in our order of rows, as the file's reader gives them
        torch.testing.assert_close(Int4.stacked(parts).dequantised(), state[f"layers.1.{ours}.weight"], rtol=1e-6, atol=1e-6)
        linear = decoder.get_submodule(f"layers.1.{ours}")
        assert isinstance(linear, Int4Linear)
        found = linear.layout.written_out(torch.float32)
        # the scales are rounded to bfloat16, eight steps and a zero of them at most; rounded anew, codes would differ by whole steps
        step = parts[0].scales.max()
        assert (found - state[f"layers.1.{ours}.weight"]).abs().max() < 16 * 2**-9 * step
    assert distance(logits(decoder), logits(Decoder.of(config, state))) < 0.03
    assert tokenizer.decode(tokenizer.encode("aba ab")) == "aba ab"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.F32], ids=lambda kind: kind.name)
def test_other_blocks_are_rounded_anew(kind: Kind, scheme: Scheme, small: Small, written: Written) -> None:
    path = written(small(False), kind)
    config, state, _ = read_gguf(path, torch.float32)
    decoder, _ = load_decoder(path, torch.float32, scheme)
    assert open_gguf(path)[1].int4("blk.0.ffn_down.weight") is None
    assert distance(logits(decoder), logits(Decoder.of(config, numbers(state, scheme, tied=False)))) < 0.02


def test_an_update_is_merged_before_the_matrix_is_rounded(small: Small, written: Written, tmp_path: Path) -> None:
    path = written(small(True), Kind.Q4_1)
    a, b = torch.randn(4, 64), torch.randn(128, 4) * 0.1
    safetensors.torch.save_file({"lora.1.qkv.a": a, "lora.1.qkv.b": b}, tmp_path / "adapter.safetensors")
    adapter = read_adapter(tmp_path / "adapter.safetensors")
    _, state, _ = read_gguf(path, torch.float32)
    assert changed(adapter) == {"layers.1.attention.qkv.weight"} < state.keys()
    decoder, _ = gguf_decoder(path, torch.float32, "int4", changed(adapter))
    assert isinstance(decoder.layers[1].attention.qkv, torch.nn.Linear)
    assert type(decoder.layers[0].attention.qkv) is type(decoder.layers[1].attention.o) is Int4Linear
    merge(decoder.layers, adapter)
    quantise(decoder, "int4")
    linear = decoder.layers[1].attention.qkv
    assert isinstance(linear, Int4Linear)
    expected = Int4.of(state["layers.1.attention.qkv.weight"] + b @ a).dequantised()
    torch.testing.assert_close(linear.layout.written_out(torch.float32), expected)


def test_weights_that_are_not_finite_are_named(small: Small, tmp_path: Path) -> None:
    model = small(False)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(tmp_path)
    for scheme in SCHEMES:
        with pytest.raises(ModelError, match=r"'layers\.1\.mlp\.gate_up\.weight' holds numbers that are not finite"):
            read_decoder(tmp_path, torch.float32, scheme)


def test_tensors_that_do_not_fit_are_named_as_ever(small: Small, tmp_path: Path) -> None:
    small(False).save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(64, 60)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.self_attn\.o_proj\.weight' is \(64, 60\), the config says \(64, 64\)"):
        read_decoder(tmp_path, torch.float32, "int4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_token_by_token_is_reading_the_whole(scheme: Scheme, small: Small, tmp_path: Path) -> None:
    """A prompt of many rows is multiplied in another way than a step of few; both give the same text."""
    small(False).save_pretrained(tmp_path)
    decoder, ids = read_decoder(tmp_path, torch.float32, scheme), IDS.repeat(1, 10)
    cache = DenseCache.allocate(2, 3, 2, 16, 200, torch.float32, "cpu")
    with torch.no_grad():
        hidden = decoder(decoder.embed(ids[:, :196]), torch.arange(196).expand(3, -1), cache)
        steps = [hidden]
        for place in range(196, 200):
            steps.append(decoder(decoder.embed(ids[:, place : place + 1]), torch.full((3, 1), place), cache))
        found = decoder.logits(torch.cat(steps, 1))
    assert distance(found, logits(decoder, ids)) < 0.02


@pytest.fixture(scope="module")
def pipe(mini_language: Path) -> Pipeline:
    """Real parts at a small size with random weights, the decoder in int4, and the real tokenizer."""
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=2, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 512}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)  # type: ignore[arg-type]  # all of them are sizes
    torch.nn.init.normal_(decoder.embedding.weight)
    torch.nn.init.normal_(decoder.get_parameter("head.weight"), std=0.5)
    quantise(decoder, "int4")
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    return Pipeline(Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=512))


def test_a_batch_is_answered_and_says_its_precision(pipe: Pipeline) -> None:
    pictures = [Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8), f"picture {i}") for i in range(3)]
    together = pipe([(picture, f"What is it, number {i}" + " or so" * i + "?") for i, picture in enumerate(pictures)], max_tokens=6)
    assert [getattr(answer, "precision", None) for answer in together] == ["int4/float32"] * 3
    stream = pipe.stream(pictures[0], "What is it?", max_tokens=3)
    assert "".join(stream) == stream.answer and stream.answer.precision == "int4/float32"


def test_what_cannot_be_is_told_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"quantize 'int5' is not known; choose none, int4, int8"):
        pipeline(model="org/never-fetched", quantize="int5")
    with pytest.raises(ModelError, match="runs on a processor, and on a GPU where there is Triton; leave it out on the device 'mps'"):
        resolve_quantize("int4", torch.device("mps"))
    assert resolve_quantize("none", torch.device("mps")) == "none"
    assert resolve_quantize("int4", torch.device("cuda")) == "int4" or triton is None
    picture = tmp_path / "a.ppm"
    picture.write_bytes(b"P6 2 2 255 " + bytes(12))
    assert main(["ask", str(picture), "what?", "--model", "org/never-fetched", "--quantize", "4bit"]) == 2
    assert "choose none, int4, int8" in capsys.readouterr().err
