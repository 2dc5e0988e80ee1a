"""RMSNorm against its formula in float64, with gradients and without: the two go different ways."""

import pytest
import torch
from torch import Tensor

from mmsdk.decoder.norm import RMSNorm


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.detach().double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.detach().double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(576,), (1, 1, 576), (2, 5, 64), (3, 7)])
@pytest.mark.parametrize("gradients", [False, True])
def test_it_is_the_formula(gradients: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Streams have a few channels far larger than the rest, and padding is all zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x[..., 3] += 200
    if x.ndim > 1:
        x[1:] = 0
    norm = RMSNorm(shape[-1], 1e-5).to(dtype)
    norm.weight.data.copy_(torch.randn(shape[-1], generator=generator))
    given = x.to(dtype).requires_grad_(gradients)
    found = norm(given)
    assert found.dtype == dtype and found.shape == given.shape
    # rounded twice: before the weight is applied, and after
    torch.testing.assert_close(found.double(), exact(given, norm.weight, 1e-5), rtol=max(2 * torch.finfo(dtype).eps, 2e-6), atol=1e-6)


def test_both_ways_agree_on_gradients_of_the_weight() -> None:
    """Without a gradient of its own a stream takes the fused kernel, and the weight learns all the same."""
    x, weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), list[Tensor]()
    for asked in (False, True):
        norm = RMSNorm(64, 1e-6)
        norm(x.clone().requires_grad_(asked)).square().sum().backward()
        assert norm.weight.grad is not None
        weights.append(norm.weight.grad)
    torch.testing.assert_close(*weights)
