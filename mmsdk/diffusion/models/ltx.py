"""LTX-Video, text to video (arXiv 2501.00103), as diffusers' LTXVideoTransformer3DModel has it.

Its latents come in patches already where `patch_size` is above 1: here they are a clip, and cut by the model. Places are told in seconds
and pixels, for 25 frames a second and an autoencoder of 8 x 32 x 32, as diffusers' pipeline takes it.
"""

from mmsdk.diffusion.checkpoint import Family, Layers, Names, attention
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.rotary import Fractional
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["FAMILY"]

_RATE, _AUTOENCODER = 25.0, (8.0, 32.0, 32.0)


def _config(fields: Fields) -> DiTConfig:
    heads, head_dim = fields.whole("num_attention_heads", 32), fields.whole("attention_head_dim", 64)
    side, frames = fields.whole("patch_size", 1), fields.whole("patch_size_t", 1)
    if side < 1 or frames < 1:
        raise ModelError(f"{fields.where}: a patch has at least one frame, row and column")
    for name, wanted in (("attention_bias", True), ("attention_out_bias", True), ("norm_elementwise_affine", False)):
        if fields.flag(name, wanted) != wanted:
            raise fields.wrong(name, str(wanted).lower())
    if fields.whole("cross_attention_dim", 2048) != heads * head_dim:
        raise fields.wrong("cross_attention_dim", f"{heads * head_dim}, the width of a token")
    patch = frames * side * side
    channels = fields.whole("in_channels", 128)
    out_channels = fields.whole("out_channels", channels)
    if channels % patch or out_channels % patch:
        raise fields.wrong("in_channels", f"a multiple of the {patch} latents of a patch, as out_channels")
    seconds, rows, columns = _AUTOENCODER
    return DiTConfig(
        channels=channels // patch,
        out_channels=out_channels // patch,
        heads=heads,
        head_dim=head_dim,
        hidden=4 * heads * head_dim,
        layers=fields.whole("num_layers", 28),
        text_width=fields.whole("caption_channels", 4096),
        rotary=Fractional((seconds * frames / _RATE, rows * side, columns * side)),
        patch=(frames, side, side),
        norm="rms",
        cross_norm=False,
        order="channels_first",
        eps=fields.real("norm_eps", 1e-6),
        query_eps=1e-5,
    )


FAMILY = Family(
    classes=("LTXVideoTransformer3DModel",),
    build=lambda fields: DiT(_config(fields)),
    names=Names(
        model={
            "patch": "proj_in",
            "time.one": "time_embed.emb.timestep_embedder.linear_1",
            "time.two": "time_embed.emb.timestep_embedder.linear_2",
            "time_out": "time_embed.linear",
            "text.one": "caption_projection.linear_1",
            "text.two": "caption_projection.linear_2",
            "modulation": "scale_shift_table",
            "out": "proj_out",
        },
        lists={
            "blocks": Layers(
                "transformer_blocks",
                {
                    **attention("attention", "attn1"),
                    **attention("cross", "attn2"),
                    "up": "ff.net.0.proj",
                    "down": "ff.net.2",
                    "modulation": "scale_shift_table",
                },
            )
        },
    ),
)
