"""Seeds regressions into the text of a scheduled program."""

import re


def synchronous(text: str, start: str) -> str:
    """The program with this all-gather in one instruction, at the place of its end."""
    begin, end = _line(text, start), _line(text, start.replace("-start", "-done"))
    arguments = begin.partition(" all-gather-start(")[2]
    return text.replace(begin, "").replace(end, f"{end.partition(' all-gather-done(')[0]} all-gather({arguments}")


def doubled(text: str, start: str) -> str:
    """The program with this all-gather twice, one directly after the other."""
    done = start.replace("-start", "-done")
    for name in (done, start):
        line = _line(text, name)
        again = line.replace(f"%{name} =", f"%{name}9 =").replace(f"(%{start})", f"(%{start}9)")
        text = text.replace(line, line + again)
    return text


def _line(text: str, name: str) -> str:
    found = re.search(rf"^  %{re.escape(name)} = .*\n", text, re.MULTILINE)
    assert found, name
    return found[0]
