"""Parts of whole numbers against exact fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmsdk.tokencomp.share import at_least, at_most, nearest


@given(n=st.integers(0, 5000), thousandths=st.integers(0, 1000))
def test_parts_are_those_of_the_exact_product(n: int, thousandths: int) -> None:
    share, exact = thousandths / 1000, Fraction(thousandths, 1000) * n
    assert at_most(share, n) == math.floor(exact) and at_least(share, n) == math.ceil(exact)
    assert nearest(share, n) == math.floor(exact + Fraction(1, 2))


@pytest.mark.parametrize(("share", "n"), [(0.29, 100), (0.57, 100), (0.58, 50)])
def test_products_that_floats_miss(share: float, n: int) -> None:
    assert int(share * n) + 1 == at_most(share, n) == at_least(share, n) == nearest(share, n)
