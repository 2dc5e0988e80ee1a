"""A checkpoint's rotary settings, in the layout of transformers 5 (`rope_parameters`) or the earlier one (`rope_theta`, `rope_scaling`)."""

import math

from mmsdk.decoder.rope import Dynamic, Linear, Llama3, LongRope, Scaling, Unscaled, Yarn
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["grown", "rope", "settings", "stretched"]

# No real context comes near; a longer one would only lead to numbers that are none.
_LONGEST = 1 << 40
_MOST_ROTATIONS = 1e6
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def stretched(fields: Fields, name: str, default: int | None = None) -> int:
    """The context that a scaling stretches, in tokens. Raises ModelError where there is none, or none that can be."""
    value = fields.whole(name, default)
    if not 1 <= value <= _LONGEST:
        raise fields.wrong(name, f"a number of tokens from 1 to {_LONGEST}")
    return value


def rope(fields: Fields, context: int) -> tuple[float, Scaling]:
    """The base and the scaling; `context` is the family's default for `max_position_embeddings`.

    Raises ModelError for a scaling that is not supported: ignored, it would give wrong answers beyond the first few thousand tokens.
    """
    group, kind = settings(fields)
    theta = group.real("rope_theta", fields.real("rope_theta", 10_000.0))
    if group.real("partial_rotary_factor", fields.real("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{group.where}: rotating a part of each head (partial_rotary_factor) is not supported")
    if kind == "default":
        return theta, Unscaled()
    longest = stretched(fields, "max_position_embeddings", context)
    original = stretched(group, "original_max_position_embeddings", fields.whole("original_max_position_embeddings", longest))
    # Phi-3 and DeepSeek may leave it to the ratio of the two contexts.
    factor = group.real("factor", longest / original) if kind in ("yarn", "longrope") else group.real("factor")
    if factor <= 0:
        raise group.wrong("factor", "above 0")
    if kind == "linear":
        return theta, Linear(factor)
    if kind == "dynamic":
        return theta, Dynamic(factor, longest)
    if kind == "longrope":
        return theta, _longrope(group, factor, original)
    if kind == "llama3":
        return theta, _llama3(group, factor, original)
    if kind == "yarn":
        return theta, _yarn(group, factor, original)
    raise ModelError(f"{group.where}: the rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")


def settings(fields: Fields) -> tuple[Fields, str]:
    """The group of rotary settings and the kind of scaling that it asks for."""
    group = fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    return group, group.text("rope_type", group.text("type", "default"))


def _longrope(group: Fields, factor: float, original: int) -> LongRope:
    short, long = group.reals("short_factor", ()), group.reals("long_factor", ())
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if not divisors or min(divisors) <= 0:
            raise group.wrong(name, "numbers above 0")
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return LongRope(short, long, original, group.real("attention_factor", amplitude))


def _llama3(group: Fields, factor: float, original: int) -> Llama3:
    low, high = group.real("low_freq_factor"), group.real("high_freq_factor")
    if not 0 < low < high:
        raise group.wrong("high_freq_factor", f"above low_freq_factor ({low}), which must be above 0")
    return Llama3(factor, low, high, original)


def _yarn(group: Fields, factor: float, original: int) -> Yarn:
    fast, slow = group.real("beta_fast", 32.0) or 32.0, group.real("beta_slow", 1.0) or 1.0
    if not all(1 / _MOST_ROTATIONS <= rotations <= _MOST_ROTATIONS for rotations in (fast, slow)):
        raise group.wrong("beta_fast", f"above 0 and up to {_MOST_ROTATIONS:.0f}, like beta_slow ({slow})")
    first, second = group.real("mscale", 0.0), group.real("mscale_all_dim", 0.0)
    if min(first, second) < 0:
        raise group.wrong("mscale", f"at least 0, like mscale_all_dim ({second})")
    amplitude = grown(factor, first) / grown(factor, second) if first and second else grown(factor, 1.0)
    return Yarn(factor, original, group.real("attention_factor", amplitude), fast, slow, group.flag("truncate", default=True))


def grown(factor: float, share: float) -> float:
    """How much sharper attention must be over `factor` times the context, as fitted in YaRN's paper."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0
