"""HunyuanVideo, text to video (arXiv 2412.03603), as diffusers' HunyuanVideoTransformer3DModel has it.

It takes the text as one vector, too, `Condition.pooled`; checkpoints with guidance distilled into them take `Condition.guidance`.
"""

from mmsdk.diffusion.checkpoint import Family, Layers, Names, attention
from mmsdk.diffusion.joint import JointConfig, JointDiT
from mmsdk.diffusion.rotary import ByAxis
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["FAMILY"]


def _config(fields: Fields) -> JointConfig:
    if fields.has("image_condition_type"):
        raise ModelError(f"{fields.where}: a model that is given pictures; only text to video is known")
    if fields.text("qk_norm", "rms_norm") != "rms_norm":
        raise fields.wrong("qk_norm", "'rms_norm'")
    heads, head_dim = fields.whole("num_attention_heads", 24), fields.whole("attention_head_dim", 128)
    axes = fields.wholes("rope_axes_dim", (16, 56, 56))
    if len(axes) != 3 or sum(axes) != head_dim or any(wide < 2 or wide % 2 for wide in axes):
        raise fields.wrong("rope_axes_dim", f"three even numbers that make up the {head_dim} channels of a head")
    side, frames = fields.whole("patch_size", 2), fields.whole("patch_size_t", 1)
    if side < 1 or frames < 1:
        raise ModelError(f"{fields.where}: a patch has at least one frame, row and column")
    channels = fields.whole("in_channels", 16)
    return JointConfig(
        channels=channels,
        out_channels=fields.whole("out_channels", channels),
        heads=heads,
        head_dim=head_dim,
        hidden=int(heads * head_dim * fields.real("mlp_ratio", 4.0)),
        double=fields.whole("num_layers", 20),
        single=fields.whole("num_single_layers", 40),
        refining=fields.whole("num_refiner_layers", 2),
        text_width=fields.whole("text_embed_dim", 4096),
        pooled_width=fields.whole("pooled_projection_dim", 768),
        guided=fields.flag("guidance_embeds", True),
        rotary=ByAxis(fields.real("rope_theta", 256.0), axes),
        patch=(frames, side, side),
    )


def _perceptron(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.one": f"{theirs}.linear_1", f"{ours}.two": f"{theirs}.linear_2"}


def _added(ours: str) -> dict[str, str]:
    """The text's own part of an attention."""
    theirs = {"query": "add_q_proj", "key": "add_k_proj", "value": "add_v_proj", "query_norm": "norm_added_q", "key_norm": "norm_added_k"}
    return {f"{ours}.{name}": f"attn.{told}" for name, told in theirs.items()}


_REFINER, _WHOLE = "context_embedder", "time_text_embed"

FAMILY = Family(
    classes=("HunyuanVideoTransformer3DModel",),
    build=lambda fields: JointDiT(_config(fields)),
    names=Names(
        model={
            "patch": "x_embedder.proj",
            **_perceptron("time", f"{_WHOLE}.timestep_embedder"),
            **_perceptron("pooled", f"{_WHOLE}.text_embedder"),
            **_perceptron("guidance", f"{_WHOLE}.guidance_embedder"),
            **_perceptron("text.time", f"{_REFINER}.time_text_embed.timestep_embedder"),
            **_perceptron("text.pooled", f"{_REFINER}.time_text_embed.text_embedder"),
            "text.enter": f"{_REFINER}.proj_in",
            "modulation": "norm_out.linear",
            "out": "proj_out",
        },
        lists={
            "text.blocks": Layers(
                f"{_REFINER}.token_refiner.refiner_blocks",
                {
                    **attention("", "attn"),
                    "norm": "norm1",
                    "norm_up": "norm2",
                    "up": "ff.net.0.proj",
                    "down": "ff.net.2",
                    "modulation": "norm_out.linear",
                },
            ),
            "doubles": Layers(
                "transformer_blocks",
                {
                    **attention("video.attention", "attn"),
                    **_added("text.attention"),
                    "video.out": "attn.to_out.0",
                    "text.out": "attn.to_add_out",
                    "video.up": "ff.net.0.proj",
                    "video.down": "ff.net.2",
                    "text.up": "ff_context.net.0.proj",
                    "text.down": "ff_context.net.2",
                    "video.modulation": "norm1.linear",
                    "text.modulation": "norm1_context.linear",
                },
            ),
            "singles": Layers(
                "single_transformer_blocks",
                {**attention("attention", "attn"), "up": "proj_mlp", "out": "proj_out", "modulation": "norm.linear"},
            ),
        },
    ),
)
