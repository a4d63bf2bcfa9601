"""Sources of figures: a text alone, and what of a figure is assumed."""

import pytest
from pydantic import ValidationError

from meshloom.compiler.spec.figure_source import FigureSource


@pytest.mark.parametrize(
    ("given", "measured", "assumed"),
    [
        ("a trace", "a trace", None),
        ({"measured": "a trace"}, "a trace", None),
        ({"assumed": "as v5p"}, None, "as v5p"),
        ({"measured": "a trace", "assumed": "the rest"}, "a trace", "the rest"),
    ],
)
def test_a_source_is_read_from_what_it_is_written_as(given, measured, assumed):
    source = FigureSource.model_validate(given)
    assert (source.measured, source.assumed) == (measured, assumed)
    assert FigureSource.model_validate(source.model_dump(mode="json")) == source


def test_a_text_alone_is_written_as_it_was():
    assert FigureSource.model_validate("a trace").model_dump(mode="json") == "a trace"


@pytest.mark.parametrize("given", ["an assumption: as v5p", {"measured": "Assumption"}])
def test_an_assumption_is_no_text_alone(given):
    with pytest.raises(ValidationError, match="it says that it is an assumption"):
        FigureSource.model_validate(given)
    FigureSource.model_validate({"measured": "an assumption of a page", "assumed": "as v5p"})


@pytest.mark.parametrize("given", [{}, "", {"assumed": ""}, {"guessed": "a"}, 3])
def test_a_source_says_something(given):
    with pytest.raises(ValidationError):
        FigureSource.model_validate(given)
