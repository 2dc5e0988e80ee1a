"""Which number format a model computes in, from what the machine is good at, and which its matrices are stored in."""

from typing import get_args

import torch

from mmsdk.errors import ModelError
from mmsdk.kernels._triton import triton
from mmsdk.quant.types import Quantize
from mmsdk.vision.values import shown

__all__ = ["native_bfloat16", "resolve_dtype", "resolve_quantize"]

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 by itself (AVX512-BF16, AMX, or Arm's BF16); emulated it is slower than float32.

    torch tells it by `get_capabilities`, from 2.11 on.
    """
    units = torch.cpu.get_capabilities()
    return any(bool(units.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """A dtype from its name; "auto", and None, is bfloat16 where the device computes in it natively, else float32.

    Raises ModelError for a name that is none of auto, float32, bfloat16, float16, and for a dtype that no model computes in.
    """
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ModelError(f"no model computes in {dtype}; choose auto, {', '.join(_NAMES)}")
        return dtype
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        native = native_bfloat16() if device.type == "cpu" else torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if not isinstance(dtype, str) or dtype not in _NAMES:
        raise ModelError(f"dtype {shown(dtype)} is not known; choose auto, {', '.join(_NAMES)}")
    return _NAMES[dtype]


def resolve_quantize(quantize: str | None, device: torch.device) -> Quantize:
    """How the language model's matrices are stored, from its name; None is "none".

    Raises ModelError for a name that is none of none, int4, int8, and for a device that fewer bits do not run on.
    """
    choices: tuple[Quantize, ...] = get_args(Quantize)
    asked: object = "none" if quantize is None else quantize
    found = next((choice for choice in choices if isinstance(asked, str) and choice == asked), None)
    if found is None:
        raise ModelError(f"quantize {shown(quantize)} is not known; choose {', '.join(choices)}")
    if found != "none" and device.type != "cpu" and (device.type != "cuda" or triton is None):
        told = "a processor, and on a GPU where there is Triton"
        raise ModelError(f"quantize {quantize!r} runs on {told}; leave it out on the device {str(device)!r}")
    return found
