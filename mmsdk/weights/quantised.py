"""A decoder read straight into fewer bits: one matrix at a time is wide, and none where the file holds the very codes already.

GGUF's Q4_0 and Q4_1 are int4, code by code. Its Q8_0 has a scale for every 32 weights and int8 one a row, so that it is read and rounded
again, as every other block format is.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.large_pages import Room
from mmsdk.decoder.native import hasten
from mmsdk.decoder.quantised import parts_of, place, rounded, scheme_of
from mmsdk.decoder.transformer import Decoder
from mmsdk.quant.int4 import Int4
from mmsdk.quant.int8 import Int8
from mmsdk.quant.types import Quantize, Scheme
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.gguf import open_gguf
from mmsdk.weights.names import GGUF, Naming, Source, empty, joined, shape_of, stored, told

__all__ = ["Codes", "gguf_decoder", "no_codes", "place_read", "put_together"]

Codes = Callable[[str], Int4 | None]
"""A tensor of a checkpoint as int4 where it is stored like this."""


def no_codes(name: str) -> None:
    """Of a checkpoint that holds numbers only."""


def gguf_decoder(path: Path, dtype: torch.dtype, quantize: Quantize, wide: frozenset[str] = frozenset()) -> tuple[Decoder, TextTokenizer]:
    """The decoder and the tokenizer of a GGUF file; see `put_together`. Raises as `mmsdk.weights.gguf.open_gguf` does."""
    config, source, tokenizer = open_gguf(path)
    return put_together(GGUF, config, source, dtype, quantize, source.int4, wide), tokenizer


def put_together(
    names: Naming,
    config: DecoderConfig,
    source: Source,
    dtype: torch.dtype,
    quantize: Quantize,
    codes: Codes = no_codes,
    wide: frozenset[str] = frozenset(),
) -> Decoder:
    """A decoder from a checkpoint's tensors, its matrices as `quantize` says, everything else in `dtype`.

    `wide` names tensors of the decoder that are left in `dtype` all the same, because they are still to change (`quantise` rounds them
    later). Raises ModelError where the tensors do not fit together, or cannot be quantised because they are not finite.
    """
    table = names(config)
    schemes = {ours: scheme_of(ours, config, quantize) if ours not in wide else "none" for ours in table}
    shapes = {ours: shape_of(source, theirs) for ours, theirs in table.items()}
    kept = [Room.needed(shape, stored(ours, dtype)) for ours, shape in shapes.items() if schemes[ours] == "none"]
    # In the dtype that `hasten` is for they are read to where they stay; another is cast, tensor after tensor, and then they move.
    room = Room(sum(kept)) if dtype == torch.bfloat16 else None
    # What is to be rounded has a place without memory until then.
    state = {
        ours: joined(source, theirs, stored(ours, dtype), empty if room is None else room.take)
        if schemes[ours] == "none"
        else torch.empty(shapes[ours], device="meta")
        for ours, theirs in table.items()
    }
    decoder = Decoder.of(config, state, told=lambda ours: told(source, table[ours]))
    for ours, theirs in table.items():
        scheme = schemes[ours]
        if scheme != "none":
            place_read(decoder, ours, source, theirs, scheme, codes)
    hasten(decoder, room)
    return decoder


def place_read(decoder: Decoder, ours: str, source: Source, theirs: tuple[str, ...], scheme: Scheme, codes: Codes = no_codes) -> None:
    """Read the tensors that make one of the decoder's, expert by expert where it is of several, and put them there in fewer bits."""
    each = len(theirs) // parts_of(ours, decoder)
    place(decoder, ours, [_matrix(source, theirs[i : i + each], scheme, codes) for i in range(0, len(theirs), each)])


def _matrix(source: Source, theirs: tuple[str, ...], scheme: Scheme, codes: Codes) -> Int4 | Int8:
    stored = [codes(name) for name in theirs] if scheme == "int4" else []
    ready = [part for part in stored if part is not None]
    if stored and len(ready) == len(theirs):
        return Int4.stacked(ready)
    return rounded(joined(source, theirs, torch.float32), scheme)
