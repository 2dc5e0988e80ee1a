"""The vision transformer by itself: number formats, rows that do not meet, memory, training, and what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmsdk.errors import InputError, ModelError
from mmsdk.vision.taps import Taps, attention_mean, attention_row
from mmsdk.vision.vit import Activation, ViT, ViTConfig

SMALL = ViTConfig(width=48, layers=3, heads=3, hidden=96, grid=4)
ALL = Taps(hidden=(0,), norms=(0,), keys=(1,), first_rows=(-1,), mean_rows=(-1,))


def pixels(b: int, height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(b, 3, height, width, generator=torch.Generator().manual_seed(seed))


def model(config: ViTConfig = SMALL) -> ViT:
    torch.manual_seed(0)
    return ViT(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "swiglu"])
@torch.inference_mode()
def test_every_number_format_runs_and_agrees(dtype: torch.dtype, activation: Activation) -> None:
    config = ViTConfig(width=48, layers=3, heads=3, hidden=96, grid=4, activation=activation)
    x = pixels(2, 28, 42)
    expected, out = model(config)(x, ALL), model(config).to(dtype)(x, ALL)
    assert out.tokens.dtype == out.taps.hidden[0].dtype == out.taps.keys[1].dtype == dtype
    assert {out.taps.norms[0].dtype, out.taps.first_rows[-1].dtype, out.taps.mean_rows[-1].dtype} == {torch.float32}
    bound = {torch.float32: 1e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    assert (out.tokens.float() - expected.tokens).abs().max() < bound
    assert (out.taps.first_rows[-1] - expected.taps.first_rows[-1]).abs().max() < bound


@pytest.mark.parametrize("class_token", [True, False])
@torch.inference_mode()
def test_rows_of_a_batch_do_not_meet(class_token: bool) -> None:
    vit = model(ViTConfig(width=48, layers=3, heads=3, hidden=96, grid=4, class_token=class_token))
    x = pixels(5, 28, 56)
    together = vit(x, ALL)
    assert together.tokens.shape == (5, 8, 48) and together.cls.shape == (5, int(class_token), 48)
    for i in range(5):
        alone = vit(x[i : i + 1], ALL)
        assert torch.allclose(alone.tokens[0], together.tokens[i], atol=1e-5)
        assert torch.allclose(alone.taps.mean_rows[-1][0], together.taps.mean_rows[-1][i], atol=1e-6)


@torch.inference_mode()
def test_taps_do_not_change_the_answer() -> None:
    """PP-01: reading attention never switches the model to another attention."""
    vit, x = model(), pixels(2, 56, 28)
    assert torch.equal(vit(x).tokens, vit(x, ALL).tokens)
    out = vit(x).taps
    assert not (out.hidden or out.norms or out.keys or out.first_rows or out.mean_rows)


@pytest.mark.parametrize("n", [1, 7, 65])
def test_attention_scores_equal_the_whole_matrix(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    query, key = torch.randn(2, 2, 3, n, 16, dtype=torch.float64, generator=generator).float()
    whole = torch.softmax(query.double() @ key.double().transpose(2, 3) / 4, dim=-1)
    assert (attention_row(query[:, :, 0], key) - whole[:, :, 0]).abs().max() < 1e-6
    assert (attention_mean(query, key) - whole.mean(dim=2)).abs().max() < 1e-6


def test_huge_queries_in_half_precision_give_finite_scores() -> None:
    """PP-10: scores are computed in float32, so 6e4 in float16 neither overflows nor becomes NaN."""
    query = torch.full((1, 2, 5, 16), 6e4, dtype=torch.float16)
    assert torch.allclose(attention_mean(query, query), torch.full((1, 2, 5), 0.2))
    assert torch.allclose(attention_row(query[:, :, 0] * 0, query), torch.full((1, 2, 5), 0.2))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own signature
        out = func(*args, **(kwargs or {}))
        self.entries = max([self.entries, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@torch.inference_mode()
def test_no_matrix_of_tokens_by_tokens_is_made() -> None:
    """PP-02: at 4,096 tokens nothing of n x n exists at any time, taps included; a slice of attention stays within 8 MiB."""
    vit = model(ViTConfig(width=32, layers=1, heads=2, hidden=32, patch=2, grid=8))
    with Largest() as seen:
        out = vit(pixels(1, 128, 128), Taps(keys=(-1,), first_rows=(-1,), mean_rows=(-1,)))
    n = 64 * 64 + 1
    assert out.taps.mean_rows[-1].shape == (1, 2, n) and torch.allclose(out.taps.mean_rows[-1].sum(dim=-1), torch.ones(1, 2), atol=1e-4)
    assert seen.entries <= 2**21 < n * n


def test_it_can_be_trained() -> None:
    vit = model().train()
    vit(pixels(2, 28, 28)).tokens.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in vit.parameters())


@pytest.mark.parametrize(("height", "width"), [(13, 14), (28, 30), (0, 14)])
def test_sides_that_do_not_divide_are_refused(height: int, width: int) -> None:
    with pytest.raises(InputError, match=f"{width}x{height} do not divide into patches of 14"):
        model()(pixels(1, height, width))


@pytest.mark.parametrize("taps", [Taps(hidden=(3,)), Taps(keys=(-4,)), Taps(first_rows=(0, 12))])
def test_a_tap_on_no_layer_is_refused(taps: Taps) -> None:
    with pytest.raises(ModelError, match="of 3"):
        model()(pixels(1, 14, 14), taps)


@pytest.mark.parametrize("change", [{"heads": 5}, {"layers": 0}, {"grid": -1}])
def test_impossible_shapes_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="sizes of at least 1"):
        ViTConfig(**{"width": 48, "heads": 3, **change})
