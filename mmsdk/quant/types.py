"""The names of what can be asked for."""

from typing import Literal

__all__ = ["Quantize", "Scheme"]

Scheme = Literal["int4", "int8"]
"""How a matrix is stored: see `mmsdk.quant.int4` and `mmsdk.quant.int8`."""

Quantize = Literal["none", "int4", "int8"]
"""The same, or left as it is."""
