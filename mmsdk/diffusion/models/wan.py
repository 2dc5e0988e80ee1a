"""Wan 2.1 and 2.2, text or a picture to video (arXiv 2503.20314), as diffusers' WanTransformer3DModel has it.

A model that begins with a picture takes it as further channels, `Condition.beside`; that of 2.1 is told, too, what a picture's encoder saw,
`Condition.seen`.
"""

from mmsdk.diffusion.checkpoint import Family, Layers, Names, attention
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.rotary import ByAxis
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["FAMILY"]


def _config(fields: Fields) -> DiTConfig:
    heads, head_dim = fields.whole("num_attention_heads", 40), fields.whole("attention_head_dim", 128)
    if fields.has("pos_embed_seq_len"):
        raise ModelError(f"{fields.where}: a model that is given its first and last picture, which is not known")
    if fields.has("image_dim") and fields.whole("added_kv_proj_dim") != heads * head_dim:
        raise fields.wrong("added_kv_proj_dim", f"{heads * head_dim}, the width of a token")
    if fields.text("qk_norm", "rms_norm_across_heads") != "rms_norm_across_heads":
        raise fields.wrong("qk_norm", "'rms_norm_across_heads'")
    patch = fields.wholes("patch_size", (1, 2, 2))
    if len(patch) != 3 or min(patch) < 1:
        raise fields.wrong("patch_size", "three whole numbers above 0")
    channels = fields.whole("in_channels", 16)
    return DiTConfig(
        channels=channels,
        out_channels=fields.whole("out_channels", channels),
        heads=heads,
        head_dim=head_dim,
        hidden=fields.whole("ffn_dim", 13824),
        layers=fields.whole("num_layers", 40),
        text_width=fields.whole("text_dim", 4096),
        rotary=ByAxis(),
        patch=(patch[0], patch[1], patch[2]),
        frequencies=fields.whole("freq_dim", 256),
        cross_norm=fields.flag("cross_attn_norm", True),
        eps=fields.real("eps", 1e-6),
        query_eps=fields.real("eps", 1e-6),
        seen_width=fields.whole("image_dim", 0),
    )


FAMILY = Family(
    classes=("WanTransformer3DModel",),
    build=lambda fields: DiT(_config(fields)),
    names=Names(
        model={
            "patch": "patch_embedding",
            "time.one": "condition_embedder.time_embedder.linear_1",
            "time.two": "condition_embedder.time_embedder.linear_2",
            "time_out": "condition_embedder.time_proj",
            "text.one": "condition_embedder.text_embedder.linear_1",
            "text.two": "condition_embedder.text_embedder.linear_2",
            "sight.enter": "condition_embedder.image_embedder.norm1",
            "sight.one": "condition_embedder.image_embedder.ff.net.0.proj",
            "sight.two": "condition_embedder.image_embedder.ff.net.2",
            "sight.leave": "condition_embedder.image_embedder.norm2",
            "modulation": "scale_shift_table",
            "out": "proj_out",
        },
        lists={
            "blocks": Layers(
                "blocks",
                {
                    **attention("attention", "attn1"),
                    **attention("cross", "attn2"),
                    "seen.key": "attn2.add_k_proj",
                    "seen.value": "attn2.add_v_proj",
                    "seen.key_norm": "attn2.norm_added_k",
                    "cross_norm": "norm2",
                    "up": "ffn.net.0.proj",
                    "down": "ffn.net.2",
                    "modulation": "scale_shift_table",
                },
            )
        },
    ),
)
