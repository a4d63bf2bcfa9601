"""A value that is not known is a value with its reason; files have all reasons, which no code writes by hand."""

import ast
from pathlib import Path

import pytest
from pydantic import NonNegativeFloat, ValidationError

import meshloom.compiler
from meshloom.compiler.core.known import OrUnknown, Reasoned, Unknown, all_known, as_json, each_known
from meshloom.models.record import Record

ROOT = Path(meshloom.compiler.__file__).resolve().parent.parent


class Part(Record):
    seconds: OrUnknown[NonNegativeFloat]
    note: str | None = None


class Whole(Reasoned):
    parts: tuple[Part, ...]
    bytes: dict[str, OrUnknown[int]]
    between: OrUnknown[tuple[float, float]]
    best: OrUnknown[Part]


def whole(*seconds: float | Unknown) -> Whole:
    parts = tuple(Part(seconds=each) for each in seconds)
    return Whole(parts=parts, bytes={"code": Unknown("refused"), "rest": 3}, between=(1.0, 2.0), best=parts[0])


@pytest.mark.parametrize(
    ("seconds", "reasons"),
    [
        ((1.0, 2.0), {}),
        ((1.0, Unknown("no chip")), {"parts[1].seconds": "no chip"}),
        ((Unknown("no chip"), Unknown("no chip")), {"parts[*].seconds": "no chip", "best.seconds": "no chip"}),
        ((Unknown("a"), Unknown("b")), {"parts[0].seconds": "a", "parts[1].seconds": "b", "best.seconds": "a"}),
    ],
)
def test_a_file_keeps_values_and_reasons(seconds, reasons):
    found = whole(*seconds)
    assert found.unknown == {"bytes.code": "refused"} | reasons
    assert Whole.model_validate_json(found.model_dump_json()) == found
    assert as_json(dict(found)) == found.model_dump(mode="json")


class Row(Record):
    cells: tuple[Part, ...]


class Rows(Reasoned):
    rows: tuple[Row, ...]


def test_lists_within_lists_keep_their_reasons():
    """All cells of the first row are unknown for one reason, one of the second for another."""
    first = Row(cells=(Part(seconds=Unknown("no chip")), Part(seconds=Unknown("no chip"))))
    second = Row(cells=(Part(seconds=1.0), Part(seconds=Unknown("refused"))))
    found = Rows(rows=(first, second))
    assert found.unknown == {"rows[0].cells[*].seconds": "no chip", "rows[1].cells[1].seconds": "refused"}
    assert Rows.model_validate_json(found.model_dump_json()) == found


def test_a_null_without_a_reason_is_refused():
    text = whole(1.0).model_dump_json()
    assert Whole.model_validate_json(text)
    for damaged in (
        text.replace("refused", "").replace('"bytes.code"', '"bytes"'),
        text.replace("1.0", "-1.0"),
        "[]",
        "{",
    ):
        with pytest.raises(ValidationError):
            Whole.model_validate_json(damaged)


def test_what_follows_from_an_unknown_value_is_unknown_for_its_reason():
    no_chip = Unknown("no chip")
    assert each_known(no_chip, lambda _: 1 / 0) is no_chip
    assert all_known([1.0, no_chip, Unknown("no price")], sum) is no_chip
    assert (each_known(2.0, lambda x: 2 * x), all_known([1.0, 2.0], sum)) == (4.0, 3.0)


def test_no_code_writes_the_path_of_an_unknown_value():
    """One walk collects them: no other file of the program sets an item of a mapping named `unknown`, or adds to it."""
    written = []
    for file in sorted(path for folder in ("compiler", "runtime") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            items = [each for each in targets if isinstance(each, ast.Subscript)]
            added = [node.target] if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr) else []
            names = [ast.unparse(each) for each in (*(item.value for item in items), *added)]
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            keys = [key for key, value in pairs if key and not isinstance(value, ast.Constant)]  # a style is no reason
            written += [file.name for name in names if name.split(".")[-1] == "unknown"]
            written += [file.name for key in keys if ast.unparse(key) == "'unknown'"]
    assert set(written) == {"known.py"}
