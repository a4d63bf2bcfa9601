"""Quantities in words."""

import pytest

from meshloom.compiler.core.format import be, counted


@pytest.mark.parametrize(
    ("number", "words", "expected"),
    [(1, ("chip",), "1 chip"), (0, ("chip",), "0 chips"), (2000, ("chip",), "2,000 chips"),
     (1, ("axis", "axes"), "1 axis"), (2, ("axis", "axes"), "2 axes")],
)  # fmt: skip
def test_a_noun_agrees_with_its_number(number, words, expected):
    assert counted(number, *words) == expected
    assert be(number) == ("is" if number == 1 else "are")
