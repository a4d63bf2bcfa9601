"""Reads a shell script far enough to know the words of its commands: variables, arrays, quotes, nothing is run.

What a script computes, `$(date)`, becomes `$(...)`. A variable that it does not set stays as it is, `${BUCKET}`.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPENING, _CLOSING = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_KEYWORDS = {"then", "else", "elif", "do", "{", "}", "!", "time", "exec", *_OPENING, *_CLOSING}
_SAYS = ("echo", "printf", "[", "[[", "test")
_ENDS = "\n;&|()"
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: lambda a, b: int(a / b), ast.FloorDiv: operator.floordiv,
}  # fmt: skip
COMPUTED = "$(...)"  # in the place of what only a shell can compute


@dataclass(frozen=True)
class ShellCommand:
    """A command of a script. words: with variables replaced. environment: what it is given, besides the system's."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass
class Script:
    """What is known at a place of a script. branched: variables that are set inside of a condition or a loop. used:
    those whose values are in a word."""

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    branched: dict[str, None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def copy(self, also_exported: Iterable[str] = ()) -> "Script":
        """Returns the script for a shell inside of it, whose variables do not come back."""
        return replace(self, variables=dict(self.variables), exported={*self.exported, *also_exported})

    def environment(self) -> dict[str, str]:
        return {name: _joined(self.variables[name]) for name in self.exported if name in self.variables}


def commands_of(text: str, script: Script | None = None) -> Iterator[ShellCommand]:
    """Yields the commands of a script in their order, and those inside of its words: `bash -c "..."`,
    `--command="..."`."""
    script = script or Script()
    reader, depth = _Reader(text, script), 0
    while (words := reader.command()) is not None:
        while words and words[0] in _KEYWORDS:
            depth += (words[0] in _OPENING) - (words[0] in _CLOSING)
            words = words[1:] if words[0] not in ("for", "case") else []
        before: dict[str, str] = {}
        is_export = bool(words) and words[0] in ("export", "declare", "local", "readonly")
        if is_export:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (set_ := reader.assigned.pop(words[0], None)):
            before[set_] = _joined(script.variables.get(set_, ""))
            if depth:
                script.branched[set_] = None
            words = words[1:]
        if is_export:
            script.exported |= {*before, *(word for word in words if _NAME.fullmatch(word))}
        elif words and words[0] not in _SAYS:
            environment = script.environment() | before
            yield ShellCommand(tuple(words), environment)
            for word in words:
                if re.search(r"\s\S", word) and word != text:
                    inner = script.copy(also_exported=before)
                    yield from commands_of(word.partition("=")[2] if word.startswith("--") else word, inner)
        while reader.inner:
            yield from commands_of(reader.inner.pop(0), script.copy())


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _whole(node: ast.expr) -> int:
    """Returns the value of an expression of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_whole(node.left), _whole(node.right))
    raise ValueError


class _Reader:
    """Reads one command after another. assigned: the words of the last command that set a variable, with its name.
    inner: scripts inside of `$(...)` in it."""

    def __init__(self, text: str, script: Script) -> None:
        self.text, self.at, self.script = text.replace("\r\n", "\n"), 0, script
        self.inner: list[str] = []
        self.assigned: dict[str, str] = {}

    def command(self) -> list[str] | None:
        """Returns the words of the next command; None at the end."""
        self.assigned, words = {}, []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] == "\n":
                self.at += 2
            elif char == "#":
                self._skip_comment()
            elif char in _ENDS:
                self.at += 1
                if words:
                    return words
            elif char in "<>":
                self._skip_redirection()
            else:
                words += self._words(is_first=len(words) == len(self.assigned) or words[0] == "export")
        return words or None

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_redirection(self) -> None:
        here = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self.text, self.at)
        if here:  # what follows is text for a program, up to its last line; a command may be in it
            self.at = here.end()
            return
        self.at = (re.compile(r"[<>&]+\s*").match(self.text, self.at) or here).end()  # type: ignore[union-attr]
        self._words(is_first=False)

    def _words(self, *, is_first: bool) -> list[str]:
        """Reads one word as it is typed, which is several words where a variable holds them."""
        found = _ASSIGNMENT.match(self.text, self.at) if is_first else None
        if found is None:
            return self._expanded()
        name, is_more = found[1], bool(found[2])
        self.at = found.end()
        if self.text[self.at : self.at + 1] == "(":
            value: str | list[str] = self._array()
        else:
            parts = self._expanded(splits=False)
            value = parts[0] if parts else ""
        if is_more:
            old = self.script.variables.get(name, [] if isinstance(value, list) else "")
            value = [*old, *value] if isinstance(old, list) else old + _joined(value)
        self.script.variables[name] = value
        word = f"{name}={_joined(value)}"
        self.assigned[word] = name
        return [word]

    def _array(self) -> list[str]:
        self.at += 1
        words: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\n":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                self._skip_comment()
            else:
                words += self._expanded()
        self.at += 1
        return words

    def _expanded(self, *, splits: bool = True, to_end: bool = False) -> list[str]:
        """Reads up to the end of a word, or of the text."""
        words, now, is_word, quote = [], "", False, ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if not quote and not to_end and (char in " \t" or char in _ENDS):
                break
            if char == quote or (not quote and char in "'\""):
                quote, is_word = ("" if quote else char), True
                self.at += 1
            elif char == "\\" and quote != "'":
                after = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if after != "\n":
                    now += after if not quote or after in '"\\$`' else char + after
                    is_word = True
            elif char == "$" and quote != "'":
                values, is_list = self._variable()
                if quote and not is_list:
                    now, is_word = now + " ".join(values), True
                    continue
                if splits and not quote:
                    values = [part for value in values for part in value.split()]
                elif not is_list:
                    values = [" ".join(values)]
                if values:
                    now, is_word = now + values[0], True
                    for value in values[1:]:
                        words.append(now)
                        now = value
            else:
                now, is_word = now + char, True
                self.at += 1
        return [*words, now] if is_word else words

    def _computed(self, expression: str) -> str:
        """Returns the value of `$((expression))` in whole numbers; COMPUTED where it is not known."""

        def value_of(found: re.Match[str]) -> str:
            self.script.used.add(found[1])
            return _joined(self.script.variables.get(found[1], COMPUTED))

        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value_of, expression)
        try:
            return str(_whole(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return COMPUTED

    def _variable(self) -> tuple[list[str], bool]:
        """Reads `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME:+if set}`, `${NAME[@]}`, `$(command)`: its words,
        and whether each is a word of its own."""
        begin = self.at
        if (found := _ARITHMETIC.match(self.text, begin)) is not None:
            self.at = found.end()
            return [self._computed(found[1])], True
        if self.text.startswith("$(", begin):
            depth, self.at = 1, begin + 2
            while depth and self.at < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
                self.at += 1
            if "\n" in (inside := self.text[begin + 2 : self.at - 1]):
                self.inner.append(inside)
            return [COMPUTED], True
        if self.text.startswith("${", begin):
            depth, self.at = 1, begin + 2
            while depth and self.at < len(self.text):
                depth += {"{": 1, "}": -1}.get(self.text[self.at], 0)
                self.at += 1
            inside = self.text[begin + 2 : self.at - 1]
            found = re.fullmatch(r"(\w+)(\[[@*]\])?(?::?([-=+?])(.*))?", inside, re.DOTALL)
            if found is None:
                return [re.sub(r"\s", "", self.text[begin : self.at])], True
            name, is_list, sign, default = found[1], bool(found[2]), found[3], found[4]
        else:
            found = _NAME.match(self.text, begin + 1) or re.compile(r"[\d@*#?]").match(self.text, begin + 1)
            if found is None:
                self.at += 1
                return ["$"], True
            self.at = found.end()
            name, is_list, sign, default = found[0], False, None, None
        value = self.script.variables.get(name)
        self.script.used.add(name)
        if default is not None and sign != "?" and (value is None) != (sign == "+"):
            inner = _Reader(default, self.script)
            text = " ".join(inner._expanded(splits=False, to_end=True))
            if sign == "=":
                self.script.variables[name] = text
            return [text], False
        if sign == "+":
            return [], False
        if value is None:
            return ([] if is_list or name in "@*" else [self.text[begin : self.at]]), True
        return (list(value) if is_list and isinstance(value, list) else [_joined(value)]), is_list
