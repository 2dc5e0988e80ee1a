"""Our own model of few words, as `mmsdk.apps.train_video` writes it: pixels in place of latents, and the clean clip predicted.

One of clips has a `side`, over which rows and columns are spread; one of a larger world has none, and is told where its window is.
"""

from mmsdk.diffusion.checkpoint import Family, Names
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.rotary import Anywhere, Roaming, Spread, Waves
from mmsdk.weights.fields import Fields

__all__ = ["CLASS", "FAMILY", "settings"]

CLASS = "MmsdkVideoTransformer3DModel"


def _config(fields: Fields) -> DiTConfig:
    patch = fields.wholes("patch_size")
    if len(patch) != 3 or min(patch) < 1:
        raise fields.wrong("patch_size", "three whole numbers above 0")
    channels = fields.whole("in_channels", 3)
    theta = fields.real("theta", 100.0)
    spread = Spread(fields.whole("side"), theta) if fields.has("side") else None
    return DiTConfig(
        channels=channels,
        out_channels=channels,
        heads=fields.whole("num_attention_heads"),
        head_dim=fields.whole("attention_head_dim"),
        hidden=fields.whole("ffn_dim"),
        layers=fields.whole("num_layers"),
        text_width=fields.whole("text_dim"),
        rotary=Roaming(theta) if spread is None else spread,
        patch=(patch[0], patch[1], patch[2]),
        frequencies=fields.whole("freq_dim"),
        order="channels_first",
        standing=Anywhere() if spread is None else Waves(spread),
        predicts="clip",
    )


def settings(config: DiTConfig) -> dict[str, object]:
    """What `config.json` says of such a model."""
    assert isinstance(config.rotary, Spread | Roaming)
    return {
        "_class_name": CLASS,
        "in_channels": config.channels,
        "num_attention_heads": config.heads,
        "attention_head_dim": config.head_dim,
        "ffn_dim": config.hidden,
        "num_layers": config.layers,
        "text_dim": config.text_width,
        "patch_size": list(config.patch),
        "freq_dim": config.frequencies,
        "theta": config.rotary.theta,
        **({"side": config.rotary.side} if isinstance(config.rotary, Spread) else {}),
    }


FAMILY = Family(classes=(CLASS,), build=lambda fields: DiT(_config(fields)), names=Names({}, {}))
