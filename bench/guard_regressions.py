"""Seeds regressions into a small repository, and prints what `meshloom guard` says of each.

    pip install -e '.[tpu]' && python bench/guard_regressions.py [--older PYTHON] [--rows TEXT] [--show] [FILE]

The repository is bench/guarded: a declaration, and a model of two layers that a user wrote. A pull request is an edit
of its files, on a branch. The base of all is compiled once, and the guard compiles each branch for hardware that is not
there. --older: the interpreter of an environment with this version of Meshloom and an older libtpu or jax, with which
the base is compiled once more. Rows are kept in bench/guard_regressions.jsonl, and are not made again. Processor
seconds are those of the guard's command.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from compiled_rows import Facts, Overrides, markdown, parser_of, read_lines

KEPT = Path(__file__).with_suffix(".jsonl")
FILES = Path(__file__).with_name("guarded")
STEP: Overrides = ("--config-dir", "conf", "--allow-code-from=decoder", "experiment=step", "compilation_cache=null")
VERSIONS = [f"jax {version('jax')}", f"libtpu {version('libtpu')}"]
OLDER = "the base branch, by an older compiler"
GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@example.org", "-c", "init.defaultBranch=main")


@dataclass(frozen=True)
class Edit:
    """A text of a file, and the text that replaces it."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class PullRequest:
    """seeded: what is wrong with it, in words; empty: nothing is. rules: those of the guard that it has to break."""

    name: str
    seeded: str
    edits: tuple[Edit, ...]
    rules: frozenset[str] = frozenset()


STEP_FILE, MODEL_FILE = "conf/experiment/step.yaml", "decoder.py"
PADDED = """B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    q_BTKGD = jnp.pad(q_BTHD.reshape(B, T, K, H // K, D), ((0, 0), (0, 0), (0, 0), (0, 3), (0, 0)))
    q_BTHD = q_BTKGD.reshape(B, T, -1, D)
    a_BTHD = context.attend(q_BTHD, k_BTKD, v_BTKD, scale=D**-0.5, mask=Mask())
    return a_BTHD.reshape(B, T, K, -1, D)[:, :, :, : H // K].reshape(B, T, H, D)"""
PULL_REQUESTS = (
    PullRequest(
        "clean",
        "",
        (
            Edit(STEP_FILE, "learning_rate: 3.0e-4", "learning_rate: 2.0e-4"),
            Edit(MODEL_FILE, "-> Array:\n    squares =", '-> Array:\n    """Returns RMSNorm."""\n    squares ='),
        ),
    ),
    PullRequest(
        "lost asynchronous gathers",
        "`overlap.flag_presets=[]`: the compiler's options are left out",
        (Edit(STEP_FILE, "optimizer:", "overlap: {flag_presets: []}\noptimizer:"),),
        frozenset({"lost-async"}),
    ),
    PullRequest(
        "attention slower by 15 %",
        "each group of 20 heads is padded to 23",
        (Edit(MODEL_FILE, "return context.attend(q_BTHD, k_BTKD, v_BTKD, scale=q_BTHD.shape[-1] ** -0.5, mask=Mask())",
              PADDED),),
        frozenset({"slower-part"}),
    ),
    PullRequest(
        "doubled all-gathers",
        "two microbatches: all weights are gathered for each",
        (Edit(STEP_FILE, "global_batch_size: 16", "global_batch_size: 16\nnum_microbatches: 2"),),
        frozenset({"more-collectives"}),
    ),
    PullRequest(
        "residual gathered as well",
        "the MLP's gate reads the normed residual, gathered over `tensor`, and `up` norms the gathered residual",
        (
            Edit(MODEL_FILE, "self.mlp(y_BTE, context)",
                 'self.mlp(y_BTE, normed(context.activation("whole_residual", x_BTE, *WHOLE)), context)'),
            Edit(MODEL_FILE, "def mlp(self, x_BTE: Array,", "def mlp(self, x_BTE: Array, again_BTE: Array,"),
            Edit(MODEL_FILE, '"bte,em->btm", x_BTE, self.up_EM', '"bte,em->btm", again_BTE, self.up_EM'),
        ),
        frozenset({"more-traffic"}),
    ),
)  # fmt: skip


def git(folder: Path, *words: str) -> None:
    subprocess.run((*GIT, "-C", str(folder), *words), check=True, stdout=subprocess.DEVNULL)


def make_repository(folder: Path) -> None:
    """Makes a repository with the files on its branch `main`, and a branch for each pull request."""
    shutil.copytree(FILES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "A step")
    for number, request in enumerate(PULL_REQUESTS):
        git(folder, "switch", "--quiet", "--create", f"pull-{number}", "main")
        for edit in request.edits:
            text = (folder / edit.file).read_text()
            assert text.count(edit.old) == 1, edit
            (folder / edit.file).write_text(text.replace(edit.old, edit.new))
        git(folder, "commit", "--quiet", "--all", "--message", request.name)
    git(folder, "switch", "--quiet", "main")


def meshloom(folder: Path, *words: str, python: str = sys.executable) -> tuple[int, float, str]:
    """Returns the exit code of a command in a folder, its processor seconds, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = (python, "-P", "-m", "meshloom", *words)
    done = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ""})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, round(seconds, 1), done.stdout


def compile_base(repository: Path, into: Path, python: str = sys.executable) -> None:
    """Compiles the base branch, which is checked out."""
    code, seconds, _ = meshloom(repository, "compile", *STEP, f"hydra.run.dir={into}", python=python)
    assert code == 0, f"the base cannot be compiled: exit code {code}"
    print(f"# the base: {seconds} processor seconds", file=sys.stderr, flush=True)


def judged(repository: Path, name: str, seeded: str, base: Path) -> Facts:
    """Returns what the guard says of the branch that is checked out."""
    code, seconds, printed = meshloom(repository, "guard", *STEP, "--base", str(base), "--json")
    print(f"# {name}: exit code {code}, {seconds} processor seconds", file=sys.stderr, flush=True)
    verdict = json.loads(printed or "{}")
    said = {key: verdict.get(key, []) for key in ("checks", "concerns", "differences", "notes")}
    return {"name": name, "seeded": seeded, "exit_code": code, "seconds": seconds, "versions": VERSIONS} | said


def rules(row: Facts, *, is_worse: bool) -> list[str]:
    """Returns the rules that fail, or those that are only named, each once."""
    failed = dict.fromkeys(one["rule"] for one in [*row["checks"], *row["concerns"]] if one["is_worse"])
    return list(
        failed if is_worse else dict.fromkeys(one["rule"] for one in row["concerns"] if one["rule"] not in failed)
    )


def changes(row: Facts) -> str:
    """Returns by how much the step and a kind of compute grew: "+8.8 %, attention +15.0 %"."""
    shown = []
    for one in row["checks"]:
        kind = one["what"].removeprefix("compute: ")
        if one["change"] is not None and (one["rule"] == "slower" or (one["is_worse"] and kind != one["what"])):
            shown.append(f"{'' if one['rule'] == 'slower' else f'{kind} '}{one['change']:+.1%}".replace("%", " %"))
    return ", ".join(shown)


def table(rows: Sequence[Facts]) -> str:
    """Returns the table of what is kept."""
    columns = (
        "pull request",
        "what it does",
        "predicted step",
        "rules that fail",
        "named only",
        "exit code",
        "processor s",
    )
    return markdown(columns, map(_cells, rows))


def _cells(row: Facts) -> list[str]:
    failed, named = (", ".join(f"`{rule}`" for rule in rules(row, is_worse=worse)) for worse in (True, False))
    what = row["seeded"] or "another learning rate, a docstring"
    return [row["name"], what, changes(row), failed or "none", named, str(row["exit_code"]), f"{row['seconds']:.0f}"]


def is_as_seeded(row: Facts) -> bool:
    """Returns True if the guard failed for what was seeded, and for nothing where nothing was."""
    request = next((each for each in PULL_REQUESTS if each.name == row["name"]), None)
    failed = set(rules(row, is_worse=True))
    return request is None or (request.rules <= failed and row["exit_code"] == (10 if request.rules else 0))


def main() -> int:
    parser = parser_of(__doc__, KEPT)
    parser.add_argument("--older", metavar="PYTHON", help="the interpreter of an environment with an older compiler")
    given = parser.parse_args()
    kept = {row["name"]: row for row in read_lines(given.file)}
    names = [] if given.show else [each.name for each in PULL_REQUESTS] + [OLDER] * bool(given.older)
    if todo := [name for name in names if name not in kept and given.rows.lower() in name.lower()]:
        with tempfile.TemporaryDirectory() as place:
            kept |= _made(Path(place), todo, given.older)
        given.file.write_text("".join(f"{json.dumps(row)}\n" for row in kept.values()))
    rows = list(kept.values())
    print(table(rows))
    return int(not all(map(is_as_seeded, rows)))


def _made(place: Path, todo: Sequence[str], older: str | None) -> dict[str, Facts]:
    """Returns the rows of these names."""
    made, repository = dict[str, Facts](), place / "repository"
    make_repository(repository)
    if asked := [(number, each) for number, each in enumerate(PULL_REQUESTS) if each.name in todo]:
        compile_base(repository, base := place / "base-step")
        for number, request in asked:
            git(repository, "switch", "--quiet", f"pull-{number}")
            made[request.name] = judged(repository, request.name, request.seeded, base)
        git(repository, "switch", "--quiet", "main")
    if OLDER in todo and older:
        compile_base(repository, base := place / "older-step", older)
        row = judged(repository, OLDER, "", base)
        made[OLDER] = row | {"seeded": "; ".join(row["notes"])}
    return made


if __name__ == "__main__":
    sys.exit(main())
