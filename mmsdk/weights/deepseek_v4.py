"""The tensors of a DeepSeek-V4 checkpoint, by DeepSeek's own names or by those of transformers' modules."""

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mmsdk.decoder.deepseek_v4 import DeepseekV4Decoder
from mmsdk.decoder.deepseek_v4_config import DeepseekV4Config, Kind
from mmsdk.decoder.quantised import scheme_of
from mmsdk.errors import ModelError
from mmsdk.quant.types import Quantize
from mmsdk.weights.names import joined, shape_of, told
from mmsdk.weights.quantised import place_read
from mmsdk.weights.safetensors import Checkpoint

__all__ = ["put_together"]

# From transformers' names to DeepSeek's; all that fit are applied, in this order.
_RENAMED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.compressor\.indexer\.(scorer\.)?(q_b_proj|weights_proj|wq_b)\.", r".indexer.\2."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"(\.attn\..*)kv_proj\.", r"\1wkv."),
    (r"(\.attn\..*)gate_proj\.", r"\1wgate."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)

_TOP: Mapping[str, str] = MappingProxyType({
    "embedding.weight": "embed.weight", "norm.weight": "norm.weight", "head.weight": "head.weight",
    "hyper.weight": "hc_head_fn", "hyper.base": "hc_head_base", "hyper.scale": "hc_head_scale",
})  # fmt: skip
_LAYER: Mapping[str, str] = MappingProxyType({
    "norm1.weight": "attn_norm.weight", "norm2.weight": "ffn_norm.weight",
    "hyper1.weight": "hc_attn_fn", "hyper1.base": "hc_attn_base", "hyper1.scale": "hc_attn_scale",
    "hyper2.weight": "hc_ffn_fn", "hyper2.base": "hc_ffn_base", "hyper2.scale": "hc_ffn_scale",
    "attention.q_down.weight": "attn.wq_a.weight", "attention.q_norm.weight": "attn.q_norm.weight",
    "attention.q_up.weight": "attn.wq_b.weight",
    "attention.kv.weight": "attn.wkv.weight", "attention.kv_norm.weight": "attn.kv_norm.weight", "attention.sinks": "attn.attn_sink",
    "attention.o_down": "attn.wo_a.weight", "attention.o_up.weight": "attn.wo_b.weight",
    "mlp.router.weight": "ffn.gate.weight", "mlp.shared.down.weight": "ffn.shared_experts.w2.weight",
})  # fmt: skip
_COMPRESSOR: Mapping[str, str] = MappingProxyType(
    {"content.weight": "wkv.weight", "gates.weight": "wgate.weight", "bias": "ape", "norm.weight": "norm.weight"}
)

# Small, and sharp where they are rounded: these stay in float32 whatever the dtype around them.
_WIDE = re.compile(r"norm\d?\.weight$|hyper\d?\.|\.sinks$|\.past\..*\.bias$|\.router\.bias$")


def put_together(sizes: DeepseekV4Config, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize) -> DeepseekV4Decoder:
    """A decoder from a checkpoint's tensors, its matrices as `quantize` says, one of them wide at a time.

    Raises ModelError where a tensor is missing, left over, of another shape or of a kind that is not read.
    """
    named, table, config = checkpoint.renamed(_RENAMED), _table(sizes), sizes.outline
    # what predicts further tokens stands beside the model, and the head of a tied one, if it is stored, is the embedding
    spare = r"mtp\..*|head\.weight" if sizes.tied else r"mtp\..*"
    named.fit({name for theirs in table.values() for name in theirs}, "the decoder of its config", spare)
    schemes = {ours: scheme_of(ours, config, quantize) for ours in table}
    state = {
        ours: _tensor(named, ours, theirs, dtype) if schemes[ours] == "none" else torch.empty(shape_of(named, theirs), device="meta")
        for ours, theirs in table.items()
    }
    decoder = DeepseekV4Decoder.made(sizes, state, lambda ours: told(named, table[ours]))
    for ours, theirs in table.items():
        scheme = schemes[ours]
        if scheme != "none":
            place_read(decoder, ours, named, theirs, scheme)
    return decoder


def _table(config: DeepseekV4Config) -> dict[str, tuple[str, ...]]:
    """For each tensor of a decoder, the checkpoint's tensors that make it, stacked by rows."""
    table: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _TOP.items()}
    if config.tied:
        del table["head.weight"]
    for layer, kind in enumerate(config.kinds):
        own = _shared(config.mixture.experts) | _past(kind)
        own |= {"mlp.router.table": ("ffn.gate.tid2eid",)} if layer in config.hashed else {"mlp.router.bias": ("ffn.gate.bias",)}
        table |= {f"layers.{layer}.{ours}": tuple(f"layers.{layer}.{name}" for name in theirs) for ours, theirs in own.items()}
    return table


def _shared(experts: int) -> dict[str, tuple[str, ...]]:
    """What every layer has."""
    own: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _LAYER.items()}
    own["mlp.shared.gate_up.weight"] = ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight")
    own["mlp.experts.gate_up"] = tuple(f"ffn.experts.{expert}.{half}.weight" for expert in range(experts) for half in ("w1", "w3"))
    own["mlp.experts.down"] = tuple(f"ffn.experts.{expert}.w2.weight" for expert in range(experts))
    return own


def _past(kind: Kind) -> dict[str, tuple[str, ...]]:
    """What compresses in a layer of this kind, and chooses."""
    if kind == "sliding":
        return {}
    own: dict[str, tuple[str, ...]] = {f"attention.past.compressor.{name}": (f"attn.compressor.{of}",) for name, of in _COMPRESSOR.items()}
    if kind == "csa":
        own |= {f"attention.past.keys.{name}": (f"attn.indexer.compressor.{of}",) for name, of in _COMPRESSOR.items()}
        own["attention.past.query.weight"] = ("attn.indexer.wq_b.weight",)
        own["attention.past.weights.weight"] = ("attn.indexer.weights_proj.weight",)
    return own


def _tensor(checkpoint: Checkpoint, ours: str, theirs: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    if ours.endswith(".router.table"):
        return _ids(checkpoint, theirs[0])
    return joined(checkpoint, theirs, torch.float32 if _WIDE.search(ours) else dtype)


def _ids(checkpoint: Checkpoint, name: str) -> Tensor:
    """A table of experts, which holds whole numbers."""
    table = checkpoint.raw(name)
    if table.is_floating_point():
        raise ModelError(
            f"{checkpoint.folder}: the tensor {checkpoint.told(name)!r} is stored as {table.dtype}, it must hold whole numbers"
        )
    return table.long()
