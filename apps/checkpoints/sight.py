"""Families with sight at tiny size: a folder that `save_pretrained` wrote, and what transformers makes of a prompt.

Pixels come from the real image processors, words from the real tokenizer and chat template, and what stands in the place of a picture or a
clip from the real processors' own methods. Nothing of mmsdk takes part.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.apps.checkpoints.drawn import draw
from mmsdk.apps.checkpoints.parts import CELLS, KINDS, MOVING, WITH_CLIPS, Kind, Parts, parts_of, tokenizer_of
from mmsdk.apps.checkpoints.said import said_in
from mmsdk.prompt import Prompt, Text
from mmsdk.vision.types import Image, Video

__all__ = ["KINDS", "MOVING", "Kind", "SightReplica"]


@dataclass(frozen=True, slots=True)
class SightReplica:
    """A folder and the transformers model that wrote it."""

    kind: Kind
    folder: Path
    tokenizer: Any
    parts: Parts

    @staticmethod
    def write(kind: Kind, folder: Path, seed: int = 0, shard: str = "50GB") -> "SightReplica":
        """Random weights, large enough that answers vary; a `shard` of at most so much in each file."""
        tokenizer = tokenizer_of(kind)
        parts = parts_of(kind, tokenizer)
        draw(parts.model, torch.Generator().manual_seed(seed))
        parts.model.eval().generation_config.eos_token_id = tokenizer.eos_token_id
        parts.model.save_pretrained(folder, max_shard_size=shard)
        tokenizer.save_pretrained(folder)
        parts.pictures.save_pretrained(folder)
        (folder / "video_preprocessor_config.json").write_text(parts.frames.to_json_string(), encoding="utf-8")
        return SightReplica(kind, folder, tokenizer, parts)

    def inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """What transformers' processor makes of a prompt, batch of one."""
        moves = self.kind == "smolvlm" and any(isinstance(item, Video) for item in prompt.media)
        source = WITH_CLIPS if moves else None
        text = self.tokenizer.apply_chat_template(said_in(prompt), chat_template=source, tokenize=False, add_generation_prompt=True)
        images = [_array(item.pixels) for item in prompt.media if isinstance(item, Image)]
        clips = [item for item in prompt.media if isinstance(item, Video)]
        seen, stands, views = self._pictures(images) if images else ({}, [], [])
        if self.kind == "paligemma":
            return self._prefix(prompt, seen)
        frames, told = self._clips(clips) if clips else ([], [])
        text = _replaced(text, {self.parts.image: stands, self.parts.video: told})
        ids = self.tokenizer(text, add_special_tokens=not text.startswith(self.tokenizer.bos_token or "\0"), return_tensors="pt")
        found = {"input_ids": ids["input_ids"], "attention_mask": torch.ones_like(ids["input_ids"]), **seen}
        if self.kind == "gemma3":
            found["token_type_ids"] = (found["input_ids"] == self.tokenizer.convert_tokens_to_ids("<image_soft_token>")).int()
        return found | self._together(prompt, found, views, frames)

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> Float[Tensor, "s v"]:
        """Scores at every token of a prompt."""
        scores: Tensor = self.parts.model(**self.inputs(prompt)).logits[0]
        return scores

    @torch.no_grad()
    def says(self, prompt: Prompt, tokens: int) -> list[int]:
        """Greedy tokens, not stopping at the end of text."""
        self.parts.model.generation_config.eos_token_id = None
        inputs = self.inputs(prompt)
        whole = self.parts.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        said: list[int] = whole[0, inputs["input_ids"].shape[1] :].tolist()
        return said

    def _pictures(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> tuple[dict[str, Tensor], list[str], list[int]]:
        """Pixels for the model, what stands for each picture, and how many views it has."""
        own = {"return_row_col_info": True} if self.kind in ("idefics3", "smolvlm") else {}
        own |= {"crop_to_patches": True} if self.kind == "internvl" else {}
        done = self.parts.pictures(images=[list(images)] if "return_row_col_info" in own else list(images), return_tensors="pt", **own)
        told = {name: value.tolist() if name == "num_patches" else value for name, value in done.items()}
        stands = [self.parts.processor.replace_image_token(told, image_idx=number) for number in range(len(images))]
        views = told.get("num_patches", [1] * len(images))
        if "rows" in told:
            views = [rows * columns + 1 for rows, columns in zip(told["rows"][0], told["cols"][0], strict=True)]
        unused = ("rows", "cols", "num_patches", "num_crops", "batch_num_images")
        return {name: value for name, value in told.items() if name not in unused}, stands, views

    def _prefix(self, prompt: Prompt, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """PaliGemma's prompt: no template, the begin token behind the last picture, the end of the line; all of it sees all of it."""
        parts = [one.content if isinstance(one, Text) else "<image>" * CELLS**2 for one in prompt.segments]
        last = max((place for place, one in enumerate(prompt.segments) if not isinstance(one, Text)), default=-1)
        text = "".join([*parts[: last + 1], self.tokenizer.bos_token, *parts[last + 1 :], "\n"])
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids), **seen}

    def _clips(self, clips: Sequence[Video]) -> tuple[list[Tensor], list[str]]:
        """Pixels of each clip's frames, and what stands for each clip."""
        frames = [self.parts.frames(images=[_array(frame) for frame in clip.frames], return_tensors="pt")["pixel_values"] for clip in clips]
        if self.kind == "smolvlm":
            frames = [one.flatten(0, 1) for one in frames]
        metadata = [SimpleNamespace(fps=1.0, timestamps=clip.times.tolist(), duration=float(clip.times[-1])) for clip in clips]
        # one processor asks for the frames of all, another for those of each
        given = {"pixel_values_videos": frames, "video_metadata": metadata}
        told = [
            self.parts.processor.replace_video_token({**given, "pixel_values": one[None]}, video_idx=number)
            for number, one in enumerate(frames)
        ]
        return frames, told

    def _together(self, prompt: Prompt, found: Mapping[str, Tensor], views: Sequence[int], frames: Sequence[Tensor]) -> dict[str, Tensor]:
        """The pixels of pictures and clips as the model takes them: side by side, or in the order of the prompt."""
        if not frames:
            return {}
        if self.kind in ("llava_next_video", "llava_onevision"):
            return {"pixel_values_videos": torch.stack(list(frames))}
        still = iter(found["pixel_values"].flatten(0, -4).split(list(views)) if views else [])
        clips = iter(frames)
        joined = torch.cat([next(clips) if isinstance(item, Video) else next(still) for item in prompt.media])
        if self.kind == "internvl":
            return {"pixel_values": joined}
        return {"pixel_values": joined[None], "pixel_attention_mask": torch.ones(1, len(joined), *joined.shape[-2:], dtype=torch.int64)}


def _array(pixels: UInt8[Tensor, "3 h w"]) -> UInt8[np.ndarray, "h w 3"]:
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def _replaced(text: str, runs: Mapping[str, Sequence[str]]) -> str:
    """The text with each placeholder widened: those of pictures first, which stand in what clips are widened to."""
    for token, stands in runs.items():
        if stands:
            text = "".join(itertools.chain(*zip(text.split(token), [*stands, ""], strict=True)))
    return text
