"""What DeepSeek-V2, V3 and V3.2 have in common: latent attention, a mixture of experts behind the first layers, the names of tensors."""

from mmsdk.attention.dsa import Lightning
from mmsdk.attention.mla import AllSeen, Latent
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Mixture
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields
from mmsdk.weights.rope import grown, rope, settings

__all__ = ["config_of", "first_layers", "latent_of", "names"]

_MOST_LAYERS = 1 << 12


def first_layers(fields: Fields, default: int) -> tuple[int, ...]:
    """The layers in front, which have no experts."""
    return tuple(range(min(fields.whole("first_k_dense_replace", default), _MOST_LAYERS)))


def latent_of(fields: Fields, q_rank: int, interleaved: bool = True, indexer: AllSeen | Lightning = AllSeen()) -> Latent:
    """The sizes of the attention; what is absent has the defaults that all of the family share."""
    return Latent(
        q_rank=q_rank,
        kv_rank=fields.whole("kv_lora_rank", 512),
        nope=fields.whole("qk_nope_head_dim", 128),
        rope=fields.whole("qk_rope_head_dim", 64),
        value=fields.whole("v_head_dim", 128),
        interleaved=interleaved,
        sharpness=_sharpness(fields),
        indexer=indexer,
    )


def config_of(fields: Fields, attention: Latent, mixture: Mixture, defaults: DecoderConfig) -> DecoderConfig:
    """The decoder's config; what is absent has the sizes of `defaults`."""
    theta, scaling = rope(fields, context=defaults.context)
    bias = fields.flag("attention_bias", default=False)
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", defaults.vocabulary),
        width=fields.whole("hidden_size", defaults.width),
        layers=fields.whole("num_hidden_layers", defaults.layers),
        heads=fields.whole("num_attention_heads", defaults.heads),
        kv_heads=1,
        head_dim=attention.head,
        inner=fields.whole("intermediate_size", defaults.inner),
        context=fields.whole("max_position_embeddings", defaults.context),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=bias,
        o_bias=bias,
        tied=fields.flag("tie_word_embeddings", default=False),
        attention=attention,
        feed=mixture,
    )


def names(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """For each tensor of the decoder, those of the checkpoint that make it; experts are stored one by one."""
    table: dict[str, tuple[str, ...]] = {"embedding.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    if not config.tied:
        table["head.weight"] = ("lm_head.weight",)
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        parts = _ATTENTION | _norms(config) | _queries(config) | _indexer(config) | _feed_forward(config, layer)
        table |= {ours + name: tuple(theirs + part for part in made) for name, made in parts.items()}
    return table


_Parts = dict[str, tuple[str, ...]]
_ATTENTION: _Parts = {
    "attention.kv_down.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.kv_norm.weight": ("self_attn.kv_a_layernorm.weight",),
    "attention.kv_up.weight": ("self_attn.kv_b_proj.weight",),
    "attention.o.weight": ("self_attn.o_proj.weight",),
}


def _norms(config: DecoderConfig) -> _Parts:
    biases: _Parts = {}
    if config.qkv_bias:
        biases = {"attention.kv_down.bias": ("self_attn.kv_a_proj_with_mqa.bias",), "attention.o.bias": ("self_attn.o_proj.bias",)}
    return biases | {"norm1.weight": ("input_layernorm.weight",), "norm2.weight": ("post_attention_layernorm.weight",)}


def _queries(config: DecoderConfig) -> _Parts:
    assert isinstance(config.attention, Latent), "a config of this family attends to latents"
    if not config.attention.q_rank:
        return {"attention.q_up.weight": ("self_attn.q_proj.weight",)}
    bias: _Parts = {"attention.q_down.bias": ("self_attn.q_a_proj.bias",)} if config.qkv_bias else {}
    return bias | {
        "attention.q_down.weight": ("self_attn.q_a_proj.weight",),
        "attention.q_norm.weight": ("self_attn.q_a_layernorm.weight",),
        "attention.q_up.weight": ("self_attn.q_b_proj.weight",),
    }


def _indexer(config: DecoderConfig) -> _Parts:
    if not (isinstance(config.attention, Latent) and isinstance(config.attention.indexer, Lightning)):
        return {}
    pairs = {"q_up.weight": "wq_b.weight", "k.weight": "wk.weight", "weights.weight": "weights_proj.weight"}
    pairs |= {f"k_norm.{kind}": f"k_norm.{kind}" for kind in ("weight", "bias")}
    return {f"attention.indexer.{ours}": (f"self_attn.indexer.{theirs}",) for ours, theirs in pairs.items()}


def _feed_forward(config: DecoderConfig, layer: int) -> _Parts:
    assert isinstance(config.feed, Mixture), "a config of this family has a mixture of experts"
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    if layer in config.feed.plain:
        return {f"mlp.{ours}.{kind}": made for kind in kinds for ours, made in _gated("mlp.", kind).items()}
    gate_up = tuple(f"mlp.experts.{i}.{part}_proj.weight" for i in range(config.feed.experts) for part in ("gate", "up"))
    balance: _Parts = {"mlp.router.bias": ("mlp.gate.e_score_correction_bias",)} if config.feed.balanced else {}
    shared = {f"mlp.shared.{ours}.{kind}": made for kind in kinds for ours, made in _gated("mlp.shared_experts.", kind).items()}
    return (
        balance
        | shared
        | {
            "mlp.router.weight": ("mlp.gate.weight",),
            "mlp.experts.gate_up": gate_up,
            "mlp.experts.down": tuple(f"mlp.experts.{i}.down_proj.weight" for i in range(config.feed.experts)),
        }
    )


def _gated(prefix: str, kind: str) -> _Parts:
    return {"gate_up": (f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}"), "down": (f"{prefix}down_proj.{kind}",)}


def _sharpness(fields: Fields) -> float:
    """Scores grow with the context as YaRN has it, m^2, where the checkpoint gives `mscale_all_dim`."""
    group, kind = settings(fields)
    share = group.real("mscale_all_dim", 0.0)
    if kind == "default" or not share:
        return 1.0
    if share < 0:
        raise ModelError(f"{group.where}: mscale_all_dim is {share}, it must not be below 0")
    return grown(group.real("factor"), share) ** 2
