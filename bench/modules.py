"""Prints how the source is divided into modules: how many, how long, and how deep they import each other.

    python bench/modules.py [--chain] [--files]

A module's depth is the number of modules in the longest chain of imports that begins with it: 1 for one that imports
no other of them. Imports inside functions and of types alone are left out. `--chain` prints the longest chain.

It also counts the functions that take a whole plan or declaration, and the files in which an existing chip, schedule,
mask and so on is named, in code or in a key or value of conf: as many as a new one has to be added to, at most. A name
may occur for another reason, so look at the files (`--files`) before you believe a number.
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "meshloom"
FOLDERS = ("models", "compiler", "runtime")
SMALL = 60  # lines
EXAMPLES = {  # of each kind of thing one that is there: its name in code and conf
    "chip": "h100", "schedule": "zb_v", "family": "mixtral", "dtype": "float16", "mask": "window",
    "mesh axis": "context", "figure of a step": "memory_fraction",
}  # fmt: skip


@dataclass(frozen=True)
class Modules:
    """num_lines: of each module but `__init__`. chains: the longest chain of imports that begins with each."""

    num_lines: Mapping[str, int]
    chains: Mapping[str, tuple[str, ...]]

    @property
    def num_small(self) -> int:
        return sum(lines < SMALL for lines in self.num_lines.values())

    @property
    def longest_chain(self) -> tuple[str, ...]:
        return max(self.chains.values(), key=len)

    @property
    def median_depth(self) -> float:
        return statistics.median(map(len, self.chains.values()))


def read_modules(root: Path, folders: tuple[str, ...] = FOLDERS) -> Modules:
    """Returns the modules below some folders of a repository, whose imports make no cycle."""
    paths = {_name(path.relative_to(root)): path for folder in folders for path in (root / folder).rglob("*.py")}
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    imports = {name: set(_imported(tree, name, paths)) - {name} for name, tree in trees.items()}

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max((chain(other) for other in imports[name]), key=len, default=()))

    lines = {name: len(path.read_text().splitlines()) for name, path in paths.items() if path.stem != "__init__"}
    return Modules(lines, {name: chain(name) for name in paths})


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imported(tree: ast.Module, name: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Yields the modules that one imports as it is imported."""
    package = name if known[name].stem == "__init__" else name.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (above, node.module) if part)
            for each in node.names:
                inner = f"{source}.{each.name}"
                yield from ([inner] if inner in known else [source] if source in known else [])


def takers_of(root: Path, kind: str, folders: tuple[str, ...] = FOLDERS) -> dict[str, list[str]]:
    """Returns the functions with a parameter that is annotated as this class, as `Plan` or `Plan[..]`, by file."""
    annotated, found = re.compile(rf"['\"]?{kind}(\[.*\])?( \| None)?['\"]?"), dict[str, list[str]]()
    for file, tree in _trees(root, folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(each.annotation and annotated.fullmatch(ast.unparse(each.annotation)) for each in arguments):
                    found.setdefault(file, []).append(node.name)
    return found


def files_naming(root: Path, name: str, folders: tuple[str, ...] = FOLDERS) -> list[str]:
    """Returns the files of code and conf that use a name, alone or as a word in a string; docs do not count."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])")
    python = [file for file, tree in _trees(root, folders) if any(word.search(each) for each in _texts(tree))]
    conf = (path for path in (root / "conf").rglob("*.yaml") if word.search(re.sub("#.*", "", path.read_text())))
    return [*python, *(str(path.relative_to(root)) for path in conf)]


def _trees(root: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        yield str(path.relative_to(root)), ast.parse(path.read_text())


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yields the names in code and its texts, without docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        texts = (getattr(node, key, None) for key in ("id", "attr", "arg", "value") if id(node) not in docs)
        yield from (text for text in texts if isinstance(text, str))


def main() -> None:
    modules = read_modules(ROOT)
    lines = modules.num_lines.values()
    print(
        f"modules: {len(lines)}, of {sum(lines):,} lines; median {statistics.median(lines):.0f}, longest {max(lines)}"
    )
    print(f"modules of fewer than {SMALL} lines: {modules.num_small}")
    print(f"longest chain of imports: {len(modules.longest_chain)} modules; median depth {modules.median_depth:.0f}")
    for kind in ("Plan", "RunSpec"):
        takers = takers_of(ROOT, kind)
        print(f"functions that take a {kind}: {sum(map(len, takers.values()))}, in {len(takers)} files")
    for kind, name in EXAMPLES.items():
        files = files_naming(ROOT, name)
        in_conf = sum(file.endswith(".yaml") for file in files)
        print(f"files that name the {kind} {name}: {len(files) - in_conf} of code, {in_conf} of conf")
        if "--files" in sys.argv:
            print("\n".join(f"  {file}" for file in files))
    if "--chain" in sys.argv:
        print("\n".join(f"  {name}" for name in modules.longest_chain))


if __name__ == "__main__":
    main()
