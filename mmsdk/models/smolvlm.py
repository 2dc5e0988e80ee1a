"""SmolVLM and SmolVLM2 (arXiv 2504.05299): Idefics3 at small sizes, whose clips are told with their times.

Of a clip each frame is seen as a whole, behind its minute and second; how many frames there are, and how long the clip is, is said in words
first. The length is the time of the last frame. The checkpoints' templates know no clips, so that these are asked by one that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from mmsdk.encoded import Encoded, frames_of
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import Slot
from mmsdk.quant.types import Quantize
from mmsdk.template import Piece
from mmsdk.vision.types import Image, Media
from mmsdk.weights.folder import Folder
from mmsdk.weights.idefics import IMAGE, Pictures, language_of, projector_of, renamed, sight_of

__all__ = ["load", "spelled"]

_CLIP = "<video>"
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

# A role with a capital, a colon (and a space, unless a picture follows), what is said, the end of an utterance and a line.
_WITH_CLIPS = """<|im_start|>
{%- for turn in messages -%}
{{ turn.role.capitalize() }}{{ ":" if turn.content is not string and turn.content[0].type == "image" else ": " }}
{%- if turn.content is string %}{{ turn.content }}{% else -%}
{%- for part in turn.content %}{{ {"image": "<image>", "video": "<video>"}.get(part.type) or part.text }}{% endfor -%}
{%- endif %}<end_of_utterance>{{ "\\n" }}
{%- endfor -%}
{{ "Assistant:" if add_generation_prompt }}"""


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    checkpoint = renamed(found)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    encoder, views = sight_of(found, checkpoint, dtype, device)
    template = replace(found.template(decoder.config.vocabulary, IMAGE), video=_CLIP, with_clips=_WITH_CLIPS)
    return Assembled(
        name=name,
        encoder=encoder,
        connector=projector_of(checkpoint, views.width, decoder.config.width, dtype, device),
        decoder=decoder,
        template=template,
        stands=_Told(Pictures(views)),
        stop_ids=found.stop_ids,
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """Pictures as Idefics3 has them, clips with their times."""

    pictures: Pictures

    def __call__(self, number: int, item: Media | Encoded) -> list[Piece]:
        if not frames_of(item):
            return self.pictures(number, item)
        times = _times(item)
        slots: Sequence[Slot] = self.pictures.slots(number, len(times))
        length = timedelta(seconds=int(times[-1]))
        told = f"You are provided the following series of {spelled(len(times))} frames from a {length} [H:MM:SS] video.\n"
        pieces: list[Piece] = [told]
        for time, slot in zip(times, slots, strict=True):
            pieces += [f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:", *self.pictures.whole(slot)]
        return [*pieces, "\n\n"]


def _times(item: Media | Encoded) -> list[float]:
    """The seconds of each frame of a clip."""
    if isinstance(item, Image):
        return [0.0]
    times: list[float] = (item.tokens.times if isinstance(item, Encoded) else item.times).tolist()
    return times


def spelled(number: int) -> str:
    """A number below a million in English words, as in "one hundred and twenty-one"."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens = _TENS[number // 10 - 2]
        return f"{tens}-{_UNITS[number % 10]}" if number % 10 else tens
    size, unit = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = number % size
    head = f"{spelled(number // size)} {unit}"
    if not rest:
        return head
    return f"{head}, {spelled(rest)}" if size == 1000 and rest >= 100 else f"{head} and {spelled(rest)}"
