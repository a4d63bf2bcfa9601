"""Records the scheduled programs that tests read, anew: all of tests/schedules, or those named.

    python bench/record_schedules.py [NAME ...]

Each is compiled by the command that tests/schedules/README.md gives for it, in a process of its own, and replaces
NAME.txt.xz when the compiler has succeeded. TPU programs need libtpu (`pip install -e '.[test]'`), GPU programs JAX's
CUDA plugin (`'.[cuda]'`); one after the other takes some ten minutes on two cores.
"""

import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tests" / "schedules"
SCRIPTS = {  # made by a script instead of the command
    "windowed_einsum": ["windowed_einsum.py"],
    **{f"pipeline_{name}": ["pipeline.py", name] for name in ("1f1b", "gpipe", "slices", "shared", "hangs")},
}

# Attributes of an instruction that the walk of memory reads; the others make most of the text.
READ = ("is_scheduled", "input_output_alias", "metadata", "index", "kind", "calls", "to_apply", "body", "condition",
        "custom_call_target", "output_to_operand_aliasing")  # fmt: skip


def commands() -> dict[str, tuple[list[str], bool]]:
    """Returns the overrides that made each program, and whether it is kept for the walk of memory alone."""
    whole, for_memory = (FOLDER / "README.md").read_text().split("\n## ")[1:]
    found = {}
    for section, is_short in ((whole, False), (for_memory, True)):
        for name, line in re.findall(r"^\*\*(\w+)\*\*:.*\n\n    meshloom compile (.*)$", section, re.M):
            found[name] = line.split(), is_short
    return found


def without_unread(text: str) -> str:
    """Returns a program without what the walk of memory does not read."""
    return "".join(_shortened(line) + "\n" for line in text.splitlines())


def _shortened(line: str) -> str:
    if header := re.match(r"((?:ENTRY )?%[\w.\-]+) \(.*\{$", line):
        return f"{header[1]} () -> () {{"
    instruction, *attributes = _split(line)
    kept = [each for each in attributes if each.split("=")[0] in READ]
    kept = [re.sub(r"metadata=\{.*?(op_name=\"[^\"]*\").*\}", r"metadata={\1}", each) for each in kept]
    kept = [each for each in kept if not each.startswith("metadata=") or "op_name=" in each]
    return ", ".join([re.sub(r" constant\(.*\)$", " constant()", instruction), *kept])


def _split(line: str) -> list[str]:
    """Returns an instruction and its attributes: what commas outside of brackets and quotes divide."""
    parts, start, depth, is_quoted = [], 0, 0, False
    for at, character in enumerate(line):
        if character == '"' and line[at - 1] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (character in "([{") - (character in ")]}")
            if character == "," and depth == 0:
                parts.append(line[start:at])
                start = at + 2
    return [*parts, line[start:]]


def compiled_text(overrides: list[str]) -> str:
    """Returns the scheduled program of `meshloom compile` with these overrides. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as run:
        line = [sys.executable, "-m", "meshloom", "compile", *overrides, f"hydra.run.dir={run}"]
        subprocess.run([*line, "compilation_cache=null"], check=True, stdout=subprocess.DEVNULL)
        return (Path(run) / "artifact/train.hlo.txt").read_text()


def record(name: str) -> None:
    """Compiles one program and writes it."""
    if name in SCRIPTS:
        script, *arguments = SCRIPTS[name]
        line = [sys.executable, FOLDER / script, *arguments]
        text = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        overrides, is_short = commands()[name]
        text = compiled_text(overrides)
        text = without_unread(text) if is_short else text
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    (FOLDER / f"{name}.txt.xz").write_bytes(packed)
    print(f"{name}: {len(text):,} characters, {len(packed):,} bytes packed", flush=True)


def main() -> None:
    known = [*commands(), *SCRIPTS]
    names = sys.argv[1:] or known
    if unknown := set(names) - set(known):
        sys.exit(f"error: there is no {', '.join(sorted(unknown))}\n  fix: use one of {', '.join(known)}")
    for name in names:
        record(name)


if __name__ == "__main__":
    main()
