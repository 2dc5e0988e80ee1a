"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL at tiny size: a folder that `save_pretrained` wrote, and what transformers makes of a prompt.

Pixels come from the real image processor, a step of a clip from its results for two frames; the words from the real tokenizer and chat
template, in which places of pictures and clips are widened as the processors do. Nothing of mmsdk takes part.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import PIL.Image
import torch
from jaxtyping import Float, Int, UInt8
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_together

from mmsdk.apps.checkpoints.drawn import draw
from mmsdk.apps.checkpoints.said import said_in
from mmsdk.prompt import Prompt
from mmsdk.vision.types import Image, Video

__all__ = ["KINDS", "Kind", "QwenReplica"]

Kind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_NAMES = ("eos", "im_start", "im_end", "vision_start", "vision_end", "image", "video")
_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PATCH, _MERGE, _TIME = 4, 2, 2
_PICTURE, _CLIP = (8 * 8, 48 * 48), (16 * 16, 40 * 40)
_TOGETHER = (4 * 16 * 16, 5 * 40 * 40)


@dataclass(frozen=True, slots=True)
class QwenReplica:
    """A folder and the transformers model that wrote it."""

    kind: Kind
    folder: Path
    model: Any
    tokenizer: Any
    processor: Any

    @staticmethod
    def write(kind: Kind, folder: Path, seed: int = 0) -> "QwenReplica":
        """Random weights, large enough that answers vary."""
        tokenizer = _tokenizer()
        ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in zip(_NAMES, _SPECIAL, strict=True)}
        model = _model(kind, len(tokenizer), ids).eval()
        draw(model, torch.Generator().manual_seed(seed))
        processor = _processor(_PICTURE)
        model.generation_config.eos_token_id = ids["eos_token_id"]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        processor.save_pretrained(folder)
        _write_clip_settings(kind, folder)
        return QwenReplica(kind, folder, model, tokenizer, processor)

    def inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """What transformers' processor makes of a prompt, batch of one."""
        pictures = [self._picture(item) for item in prompt.media if isinstance(item, Image)]
        clips = [self._clip(item) for item in prompt.media if isinstance(item, Video)]
        text = self.tokenizer.apply_chat_template(said_in(prompt), tokenize=False, add_generation_prompt=True)
        runs = {
            "<|image_pad|>": ["<|image_pad|>" * _tokens(grid) for _, grid in pictures],
            "<|video_pad|>": [self._widened(item, grid) for item, (_, grid) in zip(_videos(prompt), clips, strict=True)],
        }
        ids = self.tokenizer(_replaced(text, runs), return_tensors="pt")["input_ids"]
        image, video = (self.tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL[-2:])
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": ((ids == image) + 2 * (ids == video)).int()}
        if pictures:
            found |= {"pixel_values": _joined(pictures), "image_grid_thw": torch.tensor([grid for _, grid in pictures])}
        if clips:
            found |= {"pixel_values_videos": _joined(clips), "video_grid_thw": torch.tensor([grid for _, grid in clips])}
        if clips and self.kind == "qwen2_5_vl":
            found["second_per_grid_ts"] = torch.tensor([_TIME * _apart(item) for item in _videos(prompt)])
        return found

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> Float[Tensor, "s v"]:
        """Scores at every token of a prompt."""
        self.model.model.rope_deltas = None
        scores: Tensor = self.model(**self.inputs(prompt)).logits[0]
        return scores

    @torch.no_grad()
    def places(self, prompt: Prompt) -> tuple[Int[Tensor, "3 s"], int]:
        """Where `get_rope_index` puts every token on the three axes, and the first one of the answer."""
        given = {name: value for name, value in self.inputs(prompt).items() if not name.startswith("pixel")}
        axes, delta = self.model.model.get_rope_index(**given)
        return axes[:, 0], int(delta) + given["input_ids"].shape[1]

    @torch.no_grad()
    def says(self, prompt: Prompt, tokens: int) -> list[int]:
        """Greedy tokens, not stopping at the end of text."""
        self.model.generation_config.eos_token_id = None
        self.model.model.rope_deltas = None
        inputs = self.inputs(prompt)
        whole = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        said: list[int] = whole[0, inputs["input_ids"].shape[1] :].tolist()
        return said

    def _picture(self, item: Image) -> tuple[Tensor, tuple[int, int, int]]:
        done = self.processor(images=[item.pixels.permute(1, 2, 0).numpy()], return_tensors="pt")
        (grid,) = done["image_grid_thw"].tolist()
        return done["pixel_values"], tuple(grid)

    def _clip(self, item: Video) -> tuple[Tensor, tuple[int, int, int]]:
        """Frames at the clip's size; a step has the first half of one frame's patches in time and the second half of the next one's."""
        size = self._frame_size(item)
        kept = [*item.frames, *[item.frames[-1]] * (-len(item.frames) % _TIME)]
        found = [self.processor(images=[_resized(frame, size)], do_resize=False, return_tensors="pt") for frame in kept]
        patches = torch.stack([one["pixel_values"].view(-1, 3, _TIME, _PATCH, _PATCH)[:, :, 0] for one in found])
        steps = patches.unflatten(0, (-1, _TIME)).permute(0, 2, 3, 1, 4, 5)
        return steps.flatten(2).flatten(0, 1), (len(kept) // _TIME, size[0] // _PATCH, size[1] // _PATCH)

    def _frame_size(self, item: Video) -> tuple[int, int]:
        factor = _PATCH * _MERGE
        if self.kind == "qwen3_vl":
            found = smart_resize_together(len(item.frames), *item.size, _TIME, factor, *_TOGETHER)
        else:
            found = smart_resize(*item.size, factor, *_CLIP)
        return int(found[0]), int(found[1])

    def _widened(self, item: Video, grid: tuple[int, int, int]) -> str:
        """What the processor puts in a clip's place: where there are seconds, by its own method, without a processor of clips."""
        if self.kind != "qwen3_vl":
            return "<|video_pad|>" * _tokens(grid)
        joint = object.__new__(Qwen3VLProcessor)
        joint.video_processor = SimpleNamespace(merge_size=_MERGE, temporal_patch_size=_TIME)
        joint.video_token, joint.vision_start_token, joint.vision_end_token = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
        # numbers of frames at one a second are seconds
        metadata = [SimpleNamespace(fps=1.0, frames_indices=item.times.tolist())]
        told: str = joint.replace_video_token({"video_grid_thw": torch.tensor([grid]), "video_metadata": metadata}, video_idx=0)
        return told


def _tokenizer() -> Any:
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=list(_SPECIAL[1:]))
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _model(kind: Kind, vocabulary: int, ids: dict[str, int]) -> Any:
    text = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": ids["eos_token_id"],
        "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision: dict[str, object] = {
        "depth": 3,
        "num_heads": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _TIME,
    }
    places = {name: ids[name] for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **places))
    if kind == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]}
        vision |= {"tokens_per_second": 4}
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **places))
    vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_position_embeddings": 36}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    text |= {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **places))


def _processor(area: tuple[int, int]) -> Any:
    size = {"shortest_edge": area[0], "longest_edge": area[1]}
    return Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=_MERGE, temporal_patch_size=_TIME, size=size)


def _write_clip_settings(kind: Kind, folder: Path) -> None:
    """transformers' own class for clips needs torchvision; its settings are those of pictures but for the limits."""
    area = _TOGETHER if kind == "qwen3_vl" else _CLIP
    (folder / "video_preprocessor_config.json").write_text(_processor(area).to_json_string(), encoding="utf-8")


def _resized(frame: UInt8[Tensor, "3 h w"], size: tuple[int, int]) -> UInt8[np.ndarray, "y x 3"]:
    picture = PIL.Image.fromarray(np.ascontiguousarray(frame.permute(1, 2, 0).numpy()))
    done = picture if picture.size == (size[1], size[0]) else picture.resize((size[1], size[0]), PIL.Image.Resampling.BICUBIC)
    return np.asarray(done)


def _replaced(text: str, runs: Mapping[str, Iterable[str]]) -> str:
    for token, run in runs.items():
        parts = text.split(token)
        text = "".join(itertools.chain(*zip(parts, [*run, ""], strict=True)))
    return text


def _videos(prompt: Prompt) -> list[Video]:
    return [item for item in prompt.media if isinstance(item, Video)]


def _apart(item: Video) -> float:
    """Seconds between frames."""
    return float(item.times[-1] - item.times[0]) / max(1, len(item.times) - 1)


def _tokens(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2] // _MERGE**2


def _joined(parts: Sequence[tuple[Tensor, tuple[int, int, int]]]) -> Tensor:
    return torch.cat([patches for patches, _ in parts])
