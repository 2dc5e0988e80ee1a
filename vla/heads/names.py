"""Name tables of robot checkpoints: every spelling of a tensor's name becomes one, and every tensor has exactly one place.

openpi's PyTorch port and lerobot wrap the same modules differently (a `model.` in front, `language_model.model.` or `language_model.`,
`vision_tower.vision_model.` or `vision_tower.`), and transformers 5 has names of its own. All of them are read here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmsdk.errors import ModelError
from mmsdk.weights.names import HUGGINGFACE, joined
from mmsdk.weights.safetensors import Checkpoint, open_checkpoint

__all__ = ["Tensors", "canonical", "check", "fill", "layer_table", "one_more", "open_tensors"]

_SPELLINGS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.(?=(paligemma|vlm)_with_expert\.|(state|action_in|action_out)_proj\.|(action_)?time_mlp_)", ""),
        (r"^embed_action_time\.", ""),
        (r"^paligemma_with_expert\.gemma_expert\.(model\.)?", "expert."),
        (r"^model\.dit\.", "expert."),
        (r"^vlm_with_expert\.lm_expert\.", "expert."),
        (r"^(paligemma_with_expert\.paligemma|vlm_with_expert\.vlm|model\.vlm)\.(model\.)?", "vlm."),
        (r"^vlm\.(language_model|text_model)\.(model\.)?", "vlm.language_model."),
        (r"^vlm\.vision_tower\.(vision_model\.)?", "vlm.vision_model."),
        (r"^vlm\.language_model\.lm_head\.", "vlm.lm_head."),
    )
)
# What is there and not needed: the expert's word embedding, which no word ever reaches, and the data set's statistics, read elsewhere.
_UNUSED = re.compile(r"expert\.(lm_head|embed_tokens)\.weight|(un)?normalize_(inputs|targets|outputs)\..*|.*\.(inv_freq|position_ids)")


@dataclass(frozen=True, slots=True)
class Tensors:
    """A checkpoint's tensors by their canonical names; a `Source` of `mmsdk.weights.names`."""

    checkpoint: Checkpoint
    stored: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises ModelError where there is no such tensor."""
        return self.checkpoint.shape(self.stored.get(name, name))

    def where(self, name: str) -> str:
        """What messages call a tensor: the folder, and its name there."""
        return self.checkpoint.where(self.stored.get(name, name))

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor's values to `out`, which has its shape, in the dtype of `out`."""
        self.checkpoint.read(self.stored.get(name, name), out)

    def under(self, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors whose names begin with the prefix, read, without it."""
        names = [name for name in self.stored if name.startswith(prefix) and not _UNUSED.fullmatch(name)]
        return {name.removeprefix(prefix): joined(self, (name,), dtype) for name in names}


def canonical(name: str) -> str:
    """The one spelling of a tensor's name."""
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def open_tensors(folder: Path) -> Tensors:
    """Map a checkpoint's safetensors. Raises WeightsError as `open_checkpoint` does, ModelError where two tensors claim one place."""
    checkpoint = open_checkpoint(folder)
    stored: dict[str, str] = {}
    for name in checkpoint.files:
        if canonical(name) in stored:
            raise ModelError(f"{folder}: the tensors {stored[canonical(name)]!r} and {name!r} both claim the place {canonical(name)!r}")
        stored[canonical(name)] = name
    # Where word embedding and output matrix are one tensor, safetensors keeps either name.
    if "vlm.language_model.embed_tokens.weight" not in stored and "vlm.lm_head.weight" in stored:
        stored["vlm.language_model.embed_tokens.weight"] = stored.pop("vlm.lm_head.weight")
    return Tensors(checkpoint, stored)


def check(tensors: Tensors, wanted: Iterable[str], spare: Iterable[str] = ()) -> None:
    """Raises ModelError listing every tensor that is missing and every one that is neither wanted nor spare."""
    wanted = set(wanted)
    missing = sorted(wanted - tensors.stored.keys())
    unexpected = sorted(tensors.stored[name] for name in tensors.stored.keys() - wanted - set(spare) if not _UNUSED.fullmatch(name))
    problems = [f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if problems:
        raise ModelError(f"the tensors of {tensors.checkpoint.folder} do not fit its config; {'; '.join(problems)}")


def fill(module: nn.Module, table: Mapping[str, tuple[str, ...]], tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a module made on the meta device. Raises ModelError listing every tensor of a wrong shape."""
    state = {ours: joined(tensors, theirs, dtype) for ours, theirs in table.items()}
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    assert shapes.keys() == state.keys(), sorted(shapes.keys() ^ state.keys())
    wrong = [
        f"{' + '.join(table[name])} (has {list(tensor.shape)}, expected {list(shapes[name])})"
        for name, tensor in state.items()
        if tensor.shape != shapes[name]
    ]
    if wrong:
        raise ModelError(f"the tensors of {tensors.checkpoint.folder} do not fit its config; wrong shape: {', '.join(wrong)}")
    return state


def layer_table(ours: str, theirs: str, layers: int) -> dict[str, tuple[str, ...]]:
    """The layers of a llama-shaped transformer: our `{ours}layers.0.attention.qkv.weight` from their `{theirs}layers.0.self_attn...`."""
    return {
        f"{ours}layers.{i}.{name}.weight": tuple(f"{theirs}{part.format(i=i).removeprefix('model.')}.weight" for part in parts)
        for i in range(layers)
        for name, parts in HUGGINGFACE.weights.items()
    }


def one_more(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gemma's norms multiply by 1 + w; ours by what this makes of w. In float32, for in bfloat16 1 + w would lose most of w."""
    return {name: 1 + tensor.float() if re.search(r"norm\d?\.weight$", name) else tensor for name, tensor in state.items()}
