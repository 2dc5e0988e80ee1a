"""Tables of names that carry published weights into our `ViT`, each tensor to exactly one place.

A rule gives one of our tensors the sources that are stacked into it, in each spelling that checkpoints use. A tensor that is missing,
unexpected or of the wrong shape is a ModelError that lists every one of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.vit import Activation, ViT, ViTConfig

__all__ = ["vit_from_onnx", "vit_from_transformers"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`target` is one of our names; each of `sources` is one way to have it: names whose tensors are stacked along rows.

    `{i}` stands for the number of a layer, `{x}` for "weight" and "bias" in turn.
    """

    target: str
    sources: tuple[tuple[str, ...], ...]


def _rule(target: str, *sources: str) -> Rule:
    return Rule(target, tuple(tuple(source.split()) for source in sources))


# Checkpoints hold the first spelling; a state dict taken from a live transformers model the second.
_DINOV2 = (
    _rule("patch.{x}", "embeddings.patch_embeddings.projection.{x}"),
    _rule("cls", "embeddings.cls_token"),
    _rule("position", "embeddings.position_embeddings"),
    _rule("norm.{x}", "layernorm.{x}"),
    _rule("blocks.{i}.norm1.{x}", "encoder.layer.{i}.norm1.{x}"),
    _rule(
        "blocks.{i}.qkv.{x}",
        " ".join(f"encoder.layer.{{i}}.attention.attention.{name}.{{x}}" for name in ("query", "key", "value")),
        " ".join(f"encoder.layer.{{i}}.attention.{name}_proj.{{x}}" for name in "qkv"),
    ),
    _rule("blocks.{i}.o.{x}", "encoder.layer.{i}.attention.output.dense.{x}", "encoder.layer.{i}.attention.o_proj.{x}"),
    _rule("blocks.{i}.add1.scale", "encoder.layer.{i}.layer_scale1.lambda1"),
    _rule("blocks.{i}.norm2.{x}", "encoder.layer.{i}.norm2.{x}"),
    _rule(
        "blocks.{i}.mlp.up.{x}",
        "encoder.layer.{i}.mlp.fc1.{x}",
        "encoder.layer.{i}.mlp.weights_in.{x}",
        "encoder.layer.{i}.mlp.gate_proj.{x} encoder.layer.{i}.mlp.up_proj.{x}",
    ),
    _rule(
        "blocks.{i}.mlp.down.{x}",
        "encoder.layer.{i}.mlp.fc2.{x}",
        "encoder.layer.{i}.mlp.weights_out.{x}",
        "encoder.layer.{i}.mlp.down_proj.{x}",
    ),
    _rule("blocks.{i}.add2.scale", "encoder.layer.{i}.layer_scale2.lambda1"),
)
_CLIP = (
    _rule("patch.{x}", "embeddings.patch_embedding.{x}"),
    _rule("cls", "embeddings.class_embedding"),
    _rule("position", "embeddings.position_embedding.weight"),
    _rule("norm_first.{x}", "pre_layrnorm.{x}"),
    _rule("norm.{x}", "post_layernorm.{x}"),
    _rule("blocks.{i}.norm1.{x}", "encoder.layers.{i}.layer_norm1.{x}"),
    _rule("blocks.{i}.qkv.{x}", " ".join(f"encoder.layers.{{i}}.self_attn.{name}_proj.{{x}}" for name in "qkv")),
    _rule("blocks.{i}.o.{x}", "encoder.layers.{i}.self_attn.out_proj.{x}"),
    _rule("blocks.{i}.norm2.{x}", "encoder.layers.{i}.layer_norm2.{x}"),
    _rule("blocks.{i}.mlp.up.{x}", "encoder.layers.{i}.mlp.fc1.{x}"),
    _rule("blocks.{i}.mlp.down.{x}", "encoder.layers.{i}.mlp.fc2.{x}"),
)
_INTERNVL = (
    _rule("patch.{x}", "embeddings.patch_embeddings.projection.{x}"),
    _rule("cls", "embeddings.cls_token"),
    _rule("position", "embeddings.position_embeddings"),
    _rule("norm.{x}", "layernorm.{x}"),
    _rule("blocks.{i}.norm1.{x}", "encoder.layer.{i}.layernorm_before.{x}"),
    _rule("blocks.{i}.qkv.{x}", " ".join(f"encoder.layer.{{i}}.attention.{name}_proj.{{x}}" for name in "qkv")),
    _rule("blocks.{i}.o.{x}", "encoder.layer.{i}.attention.projection_layer.{x}"),
    _rule("blocks.{i}.add1.scale", "encoder.layer.{i}.lambda_1"),
    _rule("blocks.{i}.norm2.{x}", "encoder.layer.{i}.layernorm_after.{x}"),
    _rule("blocks.{i}.mlp.up.{x}", "encoder.layer.{i}.mlp.fc1.{x}"),
    _rule("blocks.{i}.mlp.down.{x}", "encoder.layer.{i}.mlp.fc2.{x}"),
    _rule("blocks.{i}.add2.scale", "encoder.layer.{i}.lambda_2"),
)
_TABLES = {
    "dinov2": _DINOV2,
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "idefics3_vision": _CLIP,
    "internvl_vision": _INTERNVL,
}
# Known parts that take no part in encoding patches: the token of masked training, a list 0..n-1, SigLIP's pooling head.
_UNUSED = re.compile(r"embeddings\.mask_token|embeddings\.position_ids|head\..*")
_ACTIVATIONS: Mapping[object, Activation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_PREFIXES = ("", "vision_model.")
# What a config.json leaves out has the default of its transformers class; SigLIP's published ones say little more than the family.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "dinov2": {"image_size": 224, "patch_size": 14, "mlp_ratio": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "clip_vision_model": {"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "idefics3_vision": {
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "internvl_vision": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
}
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def vit_from_onnx(path: Path) -> ViT:
    """The DINOv2 backbone of an exported ONNX model (float32), its shape read from the tensors.

    The export keeps biases under their names and numbers the matrices; a matrix's name is that of the node that multiplies by it. Heads
    are 64 wide, as at every size of DINOv2. Raises ModelError where tensors are missing or unexpected, or the file is no ONNX model.
    """
    tensors = _read_onnx(path)
    try:
        position, patch = tensors["embeddings.position_embeddings"], tensors["embeddings.patch_embeddings.projection.weight"]
        width = patch.shape[0]
        layers = len([name for name in tensors if name.endswith(".norm1.weight")])
        hidden = tensors["encoder.layer.0.mlp.fc1.bias"].shape[0]
    except (KeyError, IndexError) as error:
        raise ModelError(f"{path} holds no DINOv2 backbone, a tensor is missing or of another rank: {error}") from error
    grid = round((position.shape[0] - 1) ** 0.5)
    config = ViTConfig(width=width, layers=layers, heads=width // 64, hidden=hidden, patch=patch.shape[-1], grid=grid)
    return _build(config, _DINOV2, tensors, str(path))


def vit_from_transformers(config: Mapping[str, object], tensors: Mapping[str, Tensor], *, name: str = "the checkpoint") -> ViT:
    """A ViT from a transformers vision checkpoint: its config.json as a mapping and its tensors.

    Knows `dinov2`, `clip_vision_model` and `siglip_vision_model`, the towers `idefics3_vision` and `internvl_vision`, and the vision part
    of whole `clip` and `siglip` models. `name` is what messages call the checkpoint. Raises ModelError for another family or setting, and
    for missing or unexpected tensors.
    """
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        # A whole model: what does not belong to sight (text tower, projections) is not ours to check.
        config = {"model_type": f"{config.get('model_type')}_vision_model", **vision}
        tensors = {key: value for key, value in tensors.items() if key.startswith("vision_model.")}
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _TABLES:
        raise ModelError(f"{name} is of the family {family!r}; a vision transformer is read from {', '.join(_TABLES)}")
    anchor = _TABLES[family][0].sources[0][0].format(x="weight")
    prefix = next((p for p in _PREFIXES if p + anchor in tensors), "")
    plain = {key.removeprefix(prefix): value for key, value in tensors.items()}
    if family == "internvl_vision":
        config, plain = _internvl(config, plain, name)
    return _build(_config(family, config, name), _TABLES[family], plain, name)


def _config(family: str, given: Mapping[str, object], name: str) -> ViTConfig:
    config = {**_BASE, **_DEFAULTS[family], **given}

    def size(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{name}: config.json gives {key} = {value!r}, expected a whole number of at least 1")
        return value

    width, patch = size("hidden_size"), size("patch_size")
    act, eps = config.get("hidden_act"), config.get("layer_norm_eps")
    if act not in _ACTIVATIONS or not isinstance(eps, float):
        known = ", ".join(map(str, _ACTIVATIONS))
        raise ModelError(f"{name}: hidden_act {act!r} with layer_norm_eps {eps!r} is not supported; known: {known}")
    activation = _ACTIVATIONS[act]
    hidden = width * size("mlp_ratio") if family == "dinov2" else size("intermediate_size")
    if config.get("use_swiglu_ffn"):
        # SwiGLU keeps two thirds of the hidden width, rounded up to a multiple of 8.
        activation, hidden = "swiglu", (int(hidden * 2 / 3) + 7) // 8 * 8
    return ViTConfig(
        width=width,
        layers=size("num_hidden_layers"),
        heads=size("num_attention_heads"),
        hidden=hidden,
        patch=patch,
        grid=size("image_size") // patch,
        class_token=family not in ("siglip_vision_model", "idefics3_vision"),
        layer_scale=family in ("dinov2", "internvl_vision"),
        norm_first=family == "clip_vision_model",
        patch_bias=family != "clip_vision_model",
        activation=activation,
        eps=eps,
    )


def _internvl(config: Mapping[str, object], tensors: Mapping[str, Tensor], name: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Settings with one side for both, and what the tower leaves out: biases of queries, keys and values, the last norm."""
    if config.get("use_qk_norm") or config.get("norm_type", "layer_norm") != "layer_norm":
        raise ModelError(f"{name}: a tower with use_qk_norm or with the norm_type {config.get('norm_type')!r} is not supported")
    sides = {key: value[0] for key, value in config.items() if key in ("image_size", "patch_size") and isinstance(value, list) and value}
    like = tensors.get("embeddings.cls_token", torch.zeros(1)).flatten()
    if config.get("use_mean_pooling", True):
        # never looked at: the states in front of it are the features
        tensors = {"layernorm.weight": torch.ones_like(like), "layernorm.bias": torch.zeros_like(like), **tensors}
    if not config.get("attention_bias", False):
        kernels = [key for key in tensors if re.fullmatch(r"encoder\.layer\.\d+\.attention\.[qkv]_proj\.weight", key)]
        tensors = {**{key.removesuffix("weight") + "bias": torch.zeros_like(like) for key in kernels}, **tensors}
    return {**config, **sides}, dict(tensors)


def _build(config: ViTConfig, table: Sequence[Rule], tensors: Mapping[str, Tensor], name: str) -> ViT:
    with torch.device("meta"):
        vit = ViT(config)
    state = _rename(vit.state_dict(), table, tensors, name)
    vit.load_state_dict(state, assign=True)
    return vit.requires_grad_(False).eval()


def _rename(wanted: Mapping[str, Tensor], table: Sequence[Rule], tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    rules = {rule.target: rule for rule in table}
    state: dict[str, Tensor] = {}
    used, missing, wrong = set[str](), list[str](), list[str]()
    for target, like in wanted.items():
        if not like.numel():
            continue
        sources = _sources(rules, target)
        found = next((names for names in sources if all(n in tensors for n in names)), ())
        if not found:
            missing += [n for n in sources[0] if n not in tensors]
            continue
        used.update(found)
        parts = [tensors[n] for n in found]
        # What is stacked is stacked in equal parts: parts of other sizes could still make the right sum.
        share = torch.Size((like.shape[0] // len(parts), *like.shape[1:]))
        if any(_essential(part.shape) != _essential(share) for part in parts):
            wrong.append(f"{' + '.join(found)} (has {' + '.join(str(list(p.shape)) for p in parts)}, expected {list(like.shape)})")
            continue
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        state[target] = value.reshape(like.shape)
    unexpected = sorted(n for n in tensors if n not in used and not _UNUSED.fullmatch(n))
    problems = [f"{kind}: {', '.join(n)}" for kind, n in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)) if n]
    if problems:
        raise ModelError(f"the tensors of {name} do not fit its vision transformer; {'; '.join(problems)}")
    # A model without a class token has an empty one, which no checkpoint holds.
    return state | {target: state["position"].new_zeros(like.shape) for target, like in wanted.items() if not like.numel()}


def _essential(shape: torch.Size) -> tuple[int, ...]:
    """A shape without its leading ones, which checkpoints put before tokens and positions; any other difference is one of meaning."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])


def _sources(rules: Mapping[str, Rule], target: str) -> list[tuple[str, ...]]:
    layer = re.search(r"\.(\d+)\.", target)
    kind = target.rpartition(".")[2]
    general = re.sub(r"\.\d+\.", ".{i}.", target)
    rule = rules.get(general) or rules[re.sub(r"\.(weight|bias)$", ".{x}", general)]
    return [tuple(n.format(i=layer[1] if layer else "", x=kind) for n in names) for names in rule.sources]


def _read_onnx(path: Path) -> dict[str, Tensor]:
    try:
        graph = onnx.load(str(path)).graph
    except (OSError, DecodeError) as error:
        raise ModelError(f"{path} cannot be read as an ONNX model: {error}") from error
    values = {item.name: item for item in graph.initializer}
    read = {name: _tensor(item) for name, item in values.items() if name.startswith("backbone.")}
    tensors = {name.removeprefix("backbone."): value for name, value in read.items()}
    position: dict[str, Tensor] = {}
    for node in graph.node:
        home = node.name.removeprefix("/backbone/").rpartition("/")[0].replace("/", ".")
        for source in node.input:
            if source not in values or source in read or not node.name.startswith("/backbone/"):
                continue
            if node.op_type == "MatMul":
                tensors[f"{home}.weight"] = _tensor(values[source]).T.contiguous()
            elif home == "embeddings":
                position[node.op_type] = _tensor(values[source])[0]
    if set(position) == {"Concat", "Reshape"}:
        # The export split the positions into the class token's and the grid's.
        tensors["embeddings.position_embeddings"] = torch.cat((position["Concat"], position["Reshape"]))
    return tensors


def _tensor(item: onnx.TensorProto) -> Tensor:
    return torch.from_numpy(numpy_helper.to_array(item).copy())
