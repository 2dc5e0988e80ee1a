"""Parts of a whole number of tokens, computed in decimals: 0.29 of 100 is 29, which a float product falls short of."""

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_UP, Decimal

__all__ = ["at_least", "at_most", "nearest"]


def at_most(share: float, n: int) -> int:
    """floor(share n), the share taken as it is written in decimals."""
    return _whole(share, n, ROUND_FLOOR)


def at_least(share: float, n: int) -> int:
    """ceil(share n), the share taken as it is written in decimals."""
    return _whole(share, n, ROUND_CEILING)


def nearest(share: float, n: int) -> int:
    """share n rounded to the nearest whole number, halves up, the share taken as it is written in decimals."""
    return _whole(share, n, ROUND_HALF_UP)


def _whole(share: float, n: int, rounding: str) -> int:
    return int((Decimal(str(share)) * n).to_integral_value(rounding))
