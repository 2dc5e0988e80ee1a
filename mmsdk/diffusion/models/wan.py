"""Wan 2.1 and 2.2, text to video (arXiv 2503.20314), as diffusers' WanTransformer3DModel has it."""

from mmsdk.diffusion.checkpoint import Family, Names
from mmsdk.diffusion.dit import DiTConfig
from mmsdk.diffusion.rotary import ByAxis
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["FAMILY"]


def _config(fields: Fields) -> DiTConfig:
    if fields.has("image_dim") or fields.has("added_kv_proj_dim"):
        raise ModelError(f"{fields.where}: a model that is given pictures; only text to video is known")
    if fields.text("qk_norm", "rms_norm_across_heads") != "rms_norm_across_heads":
        raise fields.wrong("qk_norm", "'rms_norm_across_heads'")
    patch = fields.wholes("patch_size", (1, 2, 2))
    if len(patch) != 3 or min(patch) < 1:
        raise fields.wrong("patch_size", "three whole numbers above 0")
    channels = fields.whole("in_channels", 16)
    return DiTConfig(
        channels=channels,
        out_channels=fields.whole("out_channels", channels),
        heads=fields.whole("num_attention_heads", 40),
        head_dim=fields.whole("attention_head_dim", 128),
        hidden=fields.whole("ffn_dim", 13824),
        layers=fields.whole("num_layers", 40),
        text_width=fields.whole("text_dim", 4096),
        rotary=ByAxis(),
        patch=(patch[0], patch[1], patch[2]),
        frequencies=fields.whole("freq_dim", 256),
        cross_norm=fields.flag("cross_attn_norm", True),
        eps=fields.real("eps", 1e-6),
        query_eps=fields.real("eps", 1e-6),
    )


_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0", "query_norm": "norm_q", "key_norm": "norm_k"}

FAMILY = Family(
    classes=("WanTransformer3DModel",),
    config=_config,
    names=Names(
        model={
            "patch": "patch_embedding",
            "time.one": "condition_embedder.time_embedder.linear_1",
            "time.two": "condition_embedder.time_embedder.linear_2",
            "time_out": "condition_embedder.time_proj",
            "text.one": "condition_embedder.text_embedder.linear_1",
            "text.two": "condition_embedder.text_embedder.linear_2",
            "modulation": "scale_shift_table",
            "out": "proj_out",
        },
        layer={
            **{f"attention.{ours}": f"attn1.{theirs}" for ours, theirs in _ATTENTION.items()},
            **{f"cross.{ours}": f"attn2.{theirs}" for ours, theirs in _ATTENTION.items()},
            "cross_norm": "norm2",
            "up": "ffn.net.0.proj",
            "down": "ffn.net.2",
            "modulation": "scale_shift_table",
        },
        blocks="blocks",
    ),
)
