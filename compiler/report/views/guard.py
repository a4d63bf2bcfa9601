"""Shows the judgement of a step by its base: on the terminal, or as a Markdown comment of a pull request."""

import re
from collections.abc import Iterator, Sequence

from ...core.console import Column, Console, Table
from ...core.format import counted
from ..guard import Check, Concern, Verdict, human_change, human_tolerated, human_value

MARK = "<!-- meshloom guard -->"  # by which a later comment finds the earlier one
HEADINGS = ("", "base", "now", "change", "tolerated", "")
MOST_ROWS = 20  # of accepted concerns and of changed keys; --json has all
WORSE = "**worse**"


def show_verdict(verdict: Verdict, console: Console) -> None:
    """Prints the judgement: the figures, then what is worse, then what else is new."""
    console.wrapped((_headline(verdict), "bold red" if verdict.is_worse else "bold green"))
    for note in verdict.notes:
        console.wrapped((f"note: {note}", "yellow"))
    columns = [Column(name, "right" if name else "left") for name in HEADINGS]
    console.table(Table(columns, [[*_cells(each)[:-1], (_said(each), _style(each))] for each in verdict.checks]))
    for each in sorted(verdict.concerns, key=lambda one: not one.is_worse):
        console.wrapped((f"{each.rule}: ", _style(each)), each.what)
        if each.is_worse:
            console.wrapped(f"  fix: {each.fix}")
    if verdict.differences:
        console.line(f"declared otherwise: {counted(len(verdict.differences), 'key')}")
        for text in verdict.differences[:MOST_ROWS]:
            console.wrapped(f"  {text}")


def _style(each: Check | Concern) -> str:
    return "bold red" if each.is_worse else "dim"


def _said(each: Check) -> str:
    return "worse" if each.is_worse else ""


def _cells(each: Check) -> tuple[str, ...]:
    before, after = (human_value(each, value) for value in (each.base, each.head))
    return each.what, before, after, human_change(each), human_tolerated(each), _said(each)


def _headline(verdict: Verdict) -> str:
    found = dict.fromkeys(each.rule for each in (*verdict.checks, *verdict.concerns) if each.is_worse)
    result = f"worse than tolerated ({', '.join(found)})" if found else "no worse than tolerated"
    return f"{verdict.program}: {result}, compared with {verdict.base}"


def as_markdown(verdict: Verdict) -> str:
    """Returns the judgement as a comment of GitHub or GitLab. What names come from a program cannot be markup."""
    return "\n".join(_lines(verdict)) + "\n"


def _lines(verdict: Verdict) -> Iterator[str]:
    yield MARK
    worse = [each for each in verdict.concerns if each.is_worse]
    others = [each for each in verdict.concerns if not each.is_worse]
    yield f"### Meshloom: {'worse than tolerated' if verdict.is_worse else 'no worse than tolerated'}"
    yield ""
    yield f"{_code(verdict.program)}, compared with {_code(verdict.base)}."
    for note in verdict.notes:
        yield f"Note: {_plain(note)}."
    yield ""
    yield "|" + "|".join(f" {name} " for name in HEADINGS) + "|"
    yield "|---|---:|---:|---:|---:|---|"
    for each in verdict.checks:
        *cells, said = map(_plain, _cells(each))
        yield "|" + "|".join(f" {cell} " for cell in (*cells, WORSE if said else "")) + "|"
    if worse:
        yield from ("", "**Worse**", "")
        yield from (f"- {_code(each.rule)} {_plain(each.what)}<br>fix: {_plain(each.fix)}" for each in worse)
    yield from _folded("Also new, and accepted", [f"{_code(each.rule)} {_plain(each.what)}" for each in others])
    yield from _folded("Declared otherwise", [_code(text) for text in verdict.differences])


def _folded(title: str, rows: Sequence[str]) -> Iterator[str]:
    if rows:
        yield from ("", f"<details><summary>{title}: {len(rows)}</summary>", "")
        yield from (f"- {row}" for row in rows[:MOST_ROWS])
        if len(rows) > MOST_ROWS:
            yield f"- and {len(rows) - MOST_ROWS} more"
        yield from ("", "</details>")


def _code(text: str) -> str:
    """Returns text as a span of code, which nothing in it can end."""
    return "`" + re.sub(r"[`|\r\n]", " ", text) + "`"


def _plain(text: str) -> str:
    """Returns text in which no character is markup, a mention or a tag."""
    return re.sub(r"([\\`*_\[\]<>|#@~])", r"\\\1", re.sub(r"[\r\n]+", " ", text))
