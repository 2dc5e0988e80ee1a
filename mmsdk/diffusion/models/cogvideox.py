"""CogVideoX 2B, 5B and 1.5, text to video (arXiv 2408.06072), as diffusers' CogVideoXTransformer3DModel has it.

The levels of noise, which a transformer's settings do not tell, are those published with its kind: a ratio of signal to noise that is
shifted by 3 for the one without rotary positions (2B), and as it is for the others. Rotary positions are counted, as diffusers' pipeline
has them at the size that a model was trained for.
"""

from mmsdk.diffusion.checkpoint import Family, Layers, Names, attention
from mmsdk.diffusion.preserving import Preserving
from mmsdk.diffusion.rotary import Anywhere, ByAxis, Sines, Unturned
from mmsdk.diffusion.shared import SharedConfig, SharedDiT
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["FAMILY"]


def _config(fields: Fields) -> SharedConfig:
    if fields.has("ofs_embed_dim") or fields.flag("use_learned_positional_embeddings", False):
        raise ModelError(f"{fields.where}: a model that is given pictures; only text to video is known")
    for name in ("norm_elementwise_affine", "flip_sin_to_cos"):
        if not fields.flag(name, True):
            raise fields.wrong(name, "true")
    side, frames = fields.whole("patch_size", 2), fields.whole("patch_size_t", 1)
    if side < 1 or frames < 1:
        raise ModelError(f"{fields.where}: a patch has at least one frame, row and column")
    head_dim, turned = fields.whole("attention_head_dim", 64), fields.flag("use_rotary_positional_embeddings", False)
    third = head_dim // 8 * 3
    scales = fields.real("temporal_interpolation_scale", 1.0), fields.real("spatial_interpolation_scale", 1.875)
    channels = fields.whole("in_channels", 16)
    return SharedConfig(
        channels=channels,
        out_channels=fields.whole("out_channels", 16),
        heads=fields.whole("num_attention_heads", 30),
        head_dim=head_dim,
        layers=fields.whole("num_layers", 30),
        text_width=fields.whole("text_embed_dim", 4096),
        time_width=fields.whole("time_embed_dim", 512),
        rotary=ByAxis(axes=(head_dim // 4, third, third)) if turned else Unturned(),
        standing=Anywhere() if turned else Sines(*scales),
        patch=(frames, side, side),
        noise=Preserving(1.0 if turned else 3.0),
        biased=fields.flag("attention_bias", True),
        eps=fields.real("norm_eps", 1e-5),
    )


FAMILY = Family(
    classes=("CogVideoXTransformer3DModel",),
    build=lambda fields: SharedDiT(_config(fields)),
    names=Names(
        model={
            "patch": "patch_embed.proj",
            "text": "patch_embed.text_proj",
            "time.one": "time_embedding.linear_1",
            "time.two": "time_embedding.linear_2",
            "norm": "norm_final",
            "norm_out": "norm_out.norm",
            "modulation": "norm_out.linear",
            "out": "proj_out",
        },
        lists={
            "blocks": Layers(
                "transformer_blocks",
                {
                    **attention("attention", "attn1"),
                    "before.linear": "norm1.linear",
                    "before.norm": "norm1.norm",
                    "after.linear": "norm2.linear",
                    "after.norm": "norm2.norm",
                    "up": "ff.net.0.proj",
                    "down": "ff.net.2",
                },
            )
        },
    ),
)
