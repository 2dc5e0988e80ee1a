"""One row and few rows in half the bits go other ways, and come out as near to the exact product as many rows do."""

import pytest
import torch
from torch.nn import functional as F

from mmsdk.decoder.linear import Linear, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(576,), (1, 576), (1, 1, 576), (3, 576), (2, 5, 576), (70, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_exact_one_rounded(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(1536, 576).to(dtype)
    offset = torch.randn(1536).to(dtype) if bias else None
    found = product(x, weight, offset)
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    steps = 2 if bias else 1
    assert found.dtype == dtype and found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= steps * torch.finfo(dtype).eps * exact.abs().max() + 1e-4


def test_a_row_of_a_larger_tensor_is_read_where_it_lies() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 48).bfloat16()
    wide = torch.randn(48, 7).bfloat16()
    assert torch.equal(product(wide[:, 3], weight), product(wide[:, 3].contiguous(), weight))


def test_gradients_reach_the_row_and_the_weights() -> None:
    torch.manual_seed(0)
    layer, x = Linear(48, 64).bfloat16(), torch.randn(1, 48).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert torch.allclose(x.grad.float(), layer.weight.float().sum(0)[None], atol=0.05)
    assert torch.equal(layer.weight.grad, x.detach().expand(64, 48)) and bool((layer.bias.grad == 1).all())
