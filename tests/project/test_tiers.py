"""The tiers of tests, asked of tests that have marks."""

import pytest

from support.tiers import tier_of, tiered


@pytest.mark.cases(plain=2, ci=3)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.release), 2, 3])
def test_the_first_cases_are_plain_unless_a_mark_says_a_later_tier(number, request):
    assert tier_of(request.node) == ("plain", "release", "ci", "release")[number]


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize("number", range(2))
def test_of_several_lists_it_is_the_combinations_that_are_counted(letter, number, request):
    assert tier_of(request.node) == ("plain" if (letter, number) == ("a", 0) else "ci")


@pytest.mark.parametrize("name", tiered("abc", plain="a", ci="b"))
def test_what_is_neither_plain_nor_ci_is_of_a_release(name, request):
    assert tier_of(request.node) == {"a": "plain", "b": "ci", "c": "release"}[name]
