"""Random weights for models of transformers at tiny size."""

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

__all__ = ["draw"]

_ADDING_ONE = GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm


@torch.no_grad()
def draw(model: nn.Module, generator: torch.Generator) -> None:
    """Fill all parameters in place with numbers large enough that answers vary, biases too, and so that every norm scales by about one.

    Most norms scale by their weight, and Gemma's by one more than that. Scaled by two each, scores would be so large that float32 alone
    made them differ.
    """
    adding = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, _ADDING_ONE)}
    for name, parameter in model.named_parameters():
        scales = parameter.ndim == 1 and ("norm" in name or "ln_q" in name) and name.endswith("weight")
        parameter.normal_(0, 0.15, generator=generator).add_(float(scales and name not in adding))
