"""How sure a share is that was counted in a few trials, and a difference between two that were counted in the same."""

from math import comb, sqrt

__all__ = ["sign_test", "wilson"]


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval at 95 %."""
    z, share = 1.959963984540054, successes / n
    middle, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
    # the share itself is never outside, whatever rounding does to it
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def sign_test(better: int, worse: int) -> float:
    """How likely pairs would differ at least so unevenly if either way were as likely: two-sided and exact (McNemar's exact test)."""
    n, few = better + worse, min(better, worse)
    return min(1.0, 2 * sum(comb(n, k) for k in range(few + 1)) / (1 << n))
