"""Shows a view on terminals of two widths."""

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence

from meshloom.compiler.core.console import Console

STYLES = re.compile(r"\x1b\[[\d;]*m")
View = Callable[[Console], None]


def shown_at(width: int, view: View) -> list[str]:
    out = io.StringIO()
    view(Console(out, width=width, is_terminal=True))
    return STYLES.sub("", out.getvalue()).splitlines()


def check_fits_80(narrow: Sequence[str]) -> None:
    """Asserts that no line is longer than 80 columns, but for a path alone on its line, and nothing is cut."""
    assert max(len(line.rstrip()) for line in narrow if len(line.split()) > 1) <= 80
    assert "…" not in "".join(narrow)


def words_of(lines: Sequence[str]) -> Counter[str]:
    """Returns how often each word is there; what separates texts below a row counts as nothing."""
    return Counter(word for line in lines for each in line.split() if (word := each.strip(";")) and word != "\\")
