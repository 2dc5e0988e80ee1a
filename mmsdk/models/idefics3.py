"""Idefics3 (Building and better understanding vision-language models, arXiv 2408.12637): tiles, a pixel shuffle and one matrix.

A picture is cut into tiles of the size that SigLIP sees, and looked at once more as a whole; `scale_factor` x `scale_factor` patches make
one token. The family has no clips of its own: the frames of one are seen as whole pictures.
"""

import torch

from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.quant.types import Quantize
from mmsdk.weights.folder import Folder
from mmsdk.weights.idefics import IMAGE, Pictures, language_of, projector_of, renamed, sight_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    checkpoint = renamed(found)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    encoder, views = sight_of(found, checkpoint, dtype, device)
    return Assembled(
        name=name,
        encoder=encoder,
        connector=projector_of(checkpoint, views.width, decoder.config.width, dtype, device),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, image=IMAGE),
        stands=Pictures(views),
        stop_ids=found.stop_ids,
    )
