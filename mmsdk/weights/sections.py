"""A checkpoint's settings for heads that turn along time, row and column (M-RoPE): the sections beside the rotary settings."""

from mmsdk.decoder.rope import Scaling, Sections
from mmsdk.weights.fields import Fields
from mmsdk.weights.rope import rope

__all__ = ["rope_of_sections"]


def rope_of_sections(
    fields: Fields, context: int, theta: float, counts: tuple[int, ...], interleaved: bool
) -> tuple[float, Scaling, Sections]:
    """The base, the scaling and the sections; `context`, `theta` and `counts` are the family's defaults.

    Earlier checkpoints call this a scaling of the kind "mrope", which scales nothing. Raises ModelError as `mmsdk.weights.rope.rope` does.
    """
    group = fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    kind = group.text("rope_type", group.text("type", "default"))
    plain = {"rope_theta": fields.real("rope_theta", theta), **group.values, "rope_type": "default" if kind == "mrope" else kind}
    base, scaling = rope(Fields(fields.where, {**fields.values, "rope_parameters": plain}), context)
    return base, scaling, Sections(group.wholes("mrope_section", counts), interleaved)
