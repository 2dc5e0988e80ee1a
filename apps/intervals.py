"""How sure a share is that was counted in a few trials."""

from math import sqrt

__all__ = ["wilson"]


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval at 95 %."""
    z, share = 1.959963984540054, successes / n
    middle, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
    # the share itself is never outside, whatever rounding does to it
    return max(0.0, min(low, share)), min(1.0, max(high, share))
