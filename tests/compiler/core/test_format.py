"""Quantities in words."""

import pytest

from meshloom.compiler.core.format import be, counted, human_bytes, human_seconds


@pytest.mark.parametrize(
    ("number", "words", "expected"),
    [(1, ("chip",), "1 chip"), (0, ("chip",), "0 chips"), (2000, ("chip",), "2,000 chips"),
     (1, ("axis", "axes"), "1 axis"), (2, ("axis", "axes"), "2 axes")],
)  # fmt: skip
def test_a_noun_agrees_with_its_number(number, words, expected):
    assert counted(number, *words) == expected
    assert be(number) == ("is" if number == 1 else "are")


def test_a_size_is_never_1024_of_a_unit():
    sizes = [2**power + offset for power in range(10, 50) for offset in (-1, 0, 1)]
    texts = [human_bytes(size) for size in sizes]
    assert not [text for text in texts if text.startswith("1024")]
    assert (human_bytes(1023), human_bytes(2**20 - 1), human_bytes(1536)) == ("1023 B", "1.0 MiB", "1.5 KiB")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1784, "178 ms"), (119.6, "120 s"), (7_199, "7,200 s"), (7_200, "2.00 h"), (2_270_000, "26.3 days")],
)
def test_a_long_time_is_in_hours_or_days(seconds, text):
    assert human_seconds(seconds) == text
