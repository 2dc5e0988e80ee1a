"""How sure a share is that was counted in a few trials, and a difference between two that were counted in the same."""

from math import comb, exp, sqrt

__all__ = ["matched_ratio", "ratio", "sign_test", "wilson"]

_Z = 1.959963984540054


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's score interval at 95 %."""
    z, share = _Z, successes / n
    middle, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
    # the share itself is never outside, whatever rounding does to it
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def sign_test(better: int, worse: int) -> float:
    """How likely pairs would differ at least so unevenly if either way were as likely: two-sided and exact (McNemar's exact test)."""
    n, few = better + worse, min(better, worse)
    return min(1.0, 2 * sum(comb(n, k) for k in range(few + 1)) / (1 << n))


def matched_ratio(both: int, first: int, second: int) -> tuple[float, float]:
    """The 95 % interval of the second's successes over the first's in the same trials; in `both` they succeeded together, else one alone.

    The logarithm is taken as normal, each count half a trial larger, so that none that differ do not make it certain.
    """
    a, b, c = both + 0.5, first + 0.5, second + 0.5
    return _around((a + c) / (a + b), (b + c) / ((a + b) * (a + c)))


def ratio(successes: int, of: int, n: int) -> tuple[float, float]:
    """The same where nothing tells in which of n trials each succeeded: as if they were others, and wider than that where they are not."""
    a, b = successes + 0.5, of + 0.5
    return _around(a / b, 1 / a + 1 / b - 2 / (n + 1))


def _around(middle: float, variance: float) -> tuple[float, float]:
    spread = exp(_Z * sqrt(variance))
    return middle / spread, middle * spread
