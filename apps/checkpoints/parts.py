"""What families with sight are made of at tiny size: models, tokenizers and processors of transformers, family by family.

Processors of clips need torchvision, which is not asked for: the frames of a clip go through the family's image processor, and the methods
that say what stands for one are called on a processor without one.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_next_video.processing_llava_next_video import LlavaNextVideoProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE as WITH_CLIPS

__all__ = ["CELLS", "KINDS", "MOVING", "WITH_CLIPS", "Kind", "Parts", "parts_of", "tokenizer_of"]

Kind = Literal[
    "llava", "llava_next", "llava_next_video", "llava_onevision", "idefics3", "smolvlm", "internvl", "paligemma", "gemma3"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
MOVING: tuple[Kind, ...] = ("llava_next_video", "llava_onevision", "smolvlm", "internvl")
"""The families that have clips of their own."""

_SIDE, _PATCH, CELLS = 24, 4, 6
_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_SQUARE = {"height": _SIDE, "width": _SIDE}
_CANVASES = [[_SIDE * rows, _SIDE * columns] for rows in range(1, 4) for columns in range(1, 4)]
_SAID = """What is two and two? Which of the pictures is the widest? The red cube is left of the blue ball, a green cone behind it.
USER: ASSISTANT: User: Assistant: Frame from Frame1: You are provided the following series of three frames from a video. compare"""

_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message['role'].upper() + ': ' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE\n{% elif part['type'] == 'video' %}VIDEO\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}END\n{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a family is made of: its model, processors of pictures and of a clip's frames, and a processor that has its methods."""

    model: Any
    pictures: Any
    frames: Any
    processor: Any
    image: str
    video: str = ""


def parts_of(kind: Kind, tokenizer: Any) -> Parts:
    """A model with the weights that its class begins with, and what prepares its prompts."""
    return _MAKERS[kind](tokenizer)


def tokenizer_of(kind: Kind) -> Any:
    """A byte-level vocabulary, or for the first of LLaVA's one of words with a space before the first, and a begin token."""
    wordy = kind in ("llava", "llava_next", "llava_next_video")
    special = ["<s>", "</s>", *_SPECIAL[kind]]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>") if wordy else models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first") if wordy else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first") if wordy else decoders.ByteLevel()
    alphabet = ["<unk>", *string.printable] if wordy else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, show_progress=False, special_tokens=["<unk>", *special], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_SAID.splitlines(), trainer)
    if wordy:
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    begins = {"bos_token": "<s>"} if wordy or "gemma" in kind else {}
    special_names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>", **begins}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=list(_SPECIAL[kind]), **special_names)
    image, video = _PLACES[kind]
    source = _TEMPLATE if not wordy else _TEMPLATE.removeprefix("{{ bos_token or '' }}")
    wrapped.chat_template = source.replace("IMAGE", image).replace("VIDEO", video).replace("END", "</s>")
    if kind == "smolvlm":
        # the one that clips are asked by, without them
        wrapped.chat_template = WITH_CLIPS.replace("{% elif line['type'] == 'video' %}{{ '<video>' }}", "")
    return wrapped


def _language(tokenizer: Any, llama: bool) -> Any:
    return (LlamaConfig if llama else Qwen2Config)(**_TEXT, **_ends(tokenizer))


def _id(tokenizer: Any, token: str) -> int:
    found: int = tokenizer.convert_tokens_to_ids(token)
    return found


def _llava(tokenizer: Any) -> Parts:
    tower = CLIPVisionConfig(**_TOWER, image_size=_SIDE, patch_size=_PATCH)
    config = LlavaConfig(vision_config=tower, text_config=_language(tokenizer, llama=True), image_token_id=_id(tokenizer, "<image>"))
    pictures = LlavaImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE)
    joint = LlavaProcessor(pictures, tokenizer, _PATCH, "default", num_additional_image_tokens=1)
    return Parts(LlavaForConditionalGeneration(config), pictures, pictures, _EachPicture(joint), "<image>")


@dataclass(frozen=True, slots=True)
class _EachPicture:
    """LLaVA's processor, which looks at the pixels of a picture."""

    processor: Any

    def replace_image_token(self, images: Mapping[str, Tensor], image_idx: int) -> str:
        told: str = self.processor.replace_image_token({"pixel_values": images["pixel_values"].numpy()}, image_idx=image_idx)
        return told


def _anyres(tokenizer: Any, most: str = "") -> dict[str, Any]:
    own = {"vision_aspect_ratio": most, "video_token_id": _id(tokenizer, "<video>")} if most else {}
    return {"image_token_id": _id(tokenizer, "<image>"), "image_grid_pinpoints": _CANVASES, **own}


def _llava_next(tokenizer: Any) -> Parts:
    tower = CLIPVisionConfig(**_TOWER, image_size=_SIDE, patch_size=_PATCH)
    config = LlavaNextConfig(vision_config=tower, text_config=_language(tokenizer, llama=True), **_anyres(tokenizer))
    pictures = LlavaNextImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE, image_grid_pinpoints=_CANVASES)
    joint = LlavaNextProcessor(pictures, tokenizer, _PATCH, "default", num_additional_image_tokens=1)
    frames = CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE)
    return Parts(LlavaNextForConditionalGeneration(config), pictures, frames, joint, "<image>")


def _llava_next_video(tokenizer: Any) -> Parts:
    tower = CLIPVisionConfig(**_TOWER, image_size=_SIDE, patch_size=_PATCH)
    places = {**_anyres(tokenizer), "video_token_id": _id(tokenizer, "<video>")}
    config = LlavaNextVideoConfig(vision_config=tower, text_config=_language(tokenizer, llama=True), **places)
    pictures = LlavaNextImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE, image_grid_pinpoints=_CANVASES)
    joint = _bare(
        LlavaNextVideoProcessor, image_processor=pictures, patch_size=_PATCH, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", image_token="<image>", video_token="<video>",
    )  # fmt: skip
    frames = CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE)
    return Parts(LlavaNextVideoForConditionalGeneration(config), pictures, frames, _NextVideo(joint), "<image>", "<video>")


@dataclass(frozen=True, slots=True)
class _NextVideo:
    """LLaVA-NeXT-Video's processor, which takes the pixels of pictures in a list for each sample."""

    processor: Any

    def replace_image_token(self, images: Mapping[str, Any], image_idx: int) -> str:
        given = {"image_sizes": images["image_sizes"], "pixel_values": [[one[0] for one in images["pixel_values"].numpy()]]}
        told: str = self.processor.replace_image_token(given, image_idx=image_idx)
        return told

    def replace_video_token(self, clips: Mapping[str, Any], video_idx: int) -> str:
        given = {"pixel_values_videos": [one.numpy() for one in clips["pixel_values_videos"]]}
        told: str = self.processor.replace_video_token(given, video_idx=video_idx)
        return told


def _llava_onevision(tokenizer: Any) -> Parts:
    tower = SiglipVisionConfig(**_TOWER, image_size=_SIDE, patch_size=_PATCH, vision_use_head=False)
    config = LlavaOnevisionConfig(vision_config=tower, text_config=_language(tokenizer, llama=False), **_anyres(tokenizer, "anyres_max_4"))
    pictures = LlavaOnevisionImageProcessorPil(size=_SQUARE, image_grid_pinpoints=_CANVASES)
    joint = _bare(
        LlavaOnevisionProcessor, image_processor=pictures, num_image_tokens=CELLS**2, vision_feature_select_strategy="full",
        image_token="<image>", video_token="<video>", vision_aspect_ratio="anyres_max_4",
    )  # fmt: skip
    frames = SiglipImageProcessorPil(size=_SQUARE, resample=3, image_mean=pictures.image_mean, image_std=pictures.image_std)
    return Parts(LlavaOnevisionForConditionalGeneration(config), pictures, frames, joint, "<image>", "<video>")


def _idefics3(tokenizer: Any) -> Parts:
    config = Idefics3Config(vision_config=_small(), text_config=_language(tokenizer, llama=True), **_joined(tokenizer))
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 4 * _SIDE}, max_image_size={"longest_edge": _SIDE})
    joint = Idefics3Processor(pictures, tokenizer, image_seq_len=4)
    frames = Idefics3ImageProcessorPil(size={"longest_edge": 4 * _SIDE}, max_image_size={"longest_edge": _SIDE}, do_image_splitting=False)
    return Parts(Idefics3ForConditionalGeneration(config), pictures, frames, joint, "<image>")


def _smolvlm(tokenizer: Any) -> Parts:
    config = SmolVLMConfig(vision_config=_small(), text_config=_language(tokenizer, llama=True), **_joined(tokenizer))
    pictures = SmolVLMImageProcessorPil(size={"longest_edge": 4 * _SIDE}, max_image_size={"longest_edge": _SIDE})
    joint = _bare(
        _smolvlm_processor(), image_seq_len=4, fake_image_token="<fake_token_around_image>", image_token="<image>",
        global_image_token="<global-img>", video_token="<video>",
    )  # fmt: skip
    frames = SmolVLMImageProcessorPil(size={"longest_edge": 4 * _SIDE}, max_image_size={"longest_edge": _SIDE}, do_image_splitting=False)
    return Parts(SmolVLMForConditionalGeneration(config), pictures, frames, joint, "<image>", "<video>")


def _smolvlm_processor() -> Any:
    """SmolVLM's processor; it spells numbers by num2words, in whose place stand the few that are asked for."""
    words = "zero one two three four five six seven eight nine ten eleven twelve".split()
    processing_smolvlm.num2words = words.__getitem__
    return processing_smolvlm.SmolVLMProcessor


def _small() -> dict[str, object]:
    return {**_TOWER, "image_size": _SIDE, "patch_size": _PATCH}


def _joined(tokenizer: Any) -> dict[str, Any]:
    return {"scale_factor": 3, "image_token_id": _id(tokenizer, "<image>"), "pad_token_id": None, "tie_word_embeddings": False}


def _internvl(tokenizer: Any) -> Parts:
    vision = {**_TOWER, "image_size": [_SIDE, _SIDE], "patch_size": [_PATCH, _PATCH], "attention_bias": True}
    ids = {"image_token_id": _id(tokenizer, "<IMG_CONTEXT>")}
    config = InternVLConfig(vision_config=vision, text_config=_language(tokenizer, llama=False), **ids)
    pictures = GotOcr2ImageProcessorPil(size=_SQUARE, max_patches=6)
    joint = _bare(
        InternVLProcessor, image_seq_length=9, image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>",
        video_token="<video>",
    )  # fmt: skip
    frames = GotOcr2ImageProcessorPil(size=_SQUARE)
    return Parts(InternVLForConditionalGeneration(config), pictures, frames, joint, "<IMG_CONTEXT>", "<video>")


def _paligemma(tokenizer: Any) -> Parts:
    vision = SiglipVisionConfig(**_TOWER, image_size=_SIDE, patch_size=_PATCH, projection_dim=64, vision_use_head=False)
    text = GemmaConfig(**_TEXT, head_dim=16, **_ends(tokenizer))
    ids = {"image_token_index": _id(tokenizer, "<image>"), "projection_dim": 64, "hidden_size": 64}
    config = PaliGemmaConfig(vision_config=vision, text_config=text, **ids)
    pictures = SiglipImageProcessorPil(size=_SQUARE)
    return Parts(PaliGemmaForConditionalGeneration(config), pictures, pictures, _EachAlike("<image>" * CELLS**2), "<image>")


@dataclass(frozen=True, slots=True)
class _EachAlike:
    """What stands for a picture where all are alike."""

    text: str

    def replace_image_token(self, images: Mapping[str, Tensor], image_idx: int) -> str:
        return self.text


def _gemma3(tokenizer: Any) -> Parts:
    vision = SiglipVisionConfig(**_TOWER, image_size=_SIDE, patch_size=_PATCH, vision_use_head=False)
    kinds = ["sliding_attention", "full_attention"] * 2
    text = Gemma3TextConfig(**_TEXT, head_dim=16, query_pre_attn_scalar=24, sliding_window=12, layer_types=kinds, **_ends(tokenizer))
    soft, begin, end = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
    ids = {"image_token_index": _id(tokenizer, soft), "boi_token_index": _id(tokenizer, begin), "eoi_token_index": _id(tokenizer, end)}
    config = Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=9, **ids)
    pictures = Gemma3ImageProcessorPil(size=_SQUARE)
    joint = _bare(Gemma3Processor, full_image_sequence=f"\n\n{begin}{soft * 9}{end}\n\n")
    return Parts(Gemma3ForConditionalGeneration(config), pictures, pictures, joint, begin)


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}


def _bare(kind: Any, **attributes: object) -> Any:
    """A processor that has its methods and these attributes, and no processor of clips."""
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_SPECIAL: Mapping[Kind, Sequence[str]] = MappingProxyType(
    {
        "llava": ["<image>"],
        "llava_next": ["<image>"],
        "llava_next_video": ["<image>", "<video>"],
        "llava_onevision": ["<image>", "<video>"],
        "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES],
        "smolvlm": ["<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>", *_TILES],
        "internvl": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "paligemma": ["<image>"],
        "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    }
)
_PLACES: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        "llava": ("<image>", ""),
        "llava_next": ("<image>", ""),
        "llava_next_video": ("<image>", "<video>"),
        "llava_onevision": ("<image>", "<video>"),
        "idefics3": ("<image>", ""),
        "smolvlm": ("<image>", "<video>"),
        "internvl": ("<IMG_CONTEXT>", "<video>"),
        "paligemma": ("<image>", ""),
        "gemma3": ("<start_of_image>", ""),
    }
)
_MAKERS: Mapping[Kind, Callable[[Any], Parts]] = MappingProxyType(
    {
        "llava": _llava,
        "llava_next": _llava_next,
        "llava_next_video": _llava_next_video,
        "llava_onevision": _llava_onevision,
        "idefics3": _idefics3,
        "smolvlm": _smolvlm,
        "internvl": _internvl,
        "paligemma": _paligemma,
        "gemma3": _gemma3,
    }
)
