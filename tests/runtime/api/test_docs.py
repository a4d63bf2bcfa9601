"""The Python of README and docs/python.md works as typed, in a fresh process: what a reader's first session is."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.notebooks import run_cells

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "python.md"
IS_STARTED = "from jax._src.xla_bridge import backends_are_initialized as is_started"  # which has no public name
# Each for a part of the compiler that traces by itself: the head's loss, kernels of experts, rings of attention, an
# optimizer that knows matrices, loss scaling, chunks of matmuls over tensor, a GPU.
PLANS = (
    ("target=v5p-16", "num_microbatches=2", "optimizer=muon"),
    ("model=tiny_moe", "target=v5p-16", "sharding=fsdp_expert", "mesh.expert=4"),
    ("target=h100-16", "sharding=fsdp_context", "mesh.context=4", "sequence_length=8192"),
    ("target=v5e-16", "sharding=fsdp_tensor", "mesh.tensor=2", "overlap=auto", "precision=float16"),
)
NARROW = '"model.embed_dim=32", "model.num_layers=1", "sequence_length=16"'  # words of a run that is trained
TUNE = """
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.tune.answer import Runner, tune
from meshloom.runtime.tune.variants import find_space
groups = "tune.groups={sharding: [fsdp], remat: [full]}"
words = ("target=v5p-16", groups, "tune.microbatches=[1]", "tune.mesh={replica: [1]}")
assert tune(find_space(Request(words)).variants, Runner(map, map)).best
"""


def blocks(page: Path = PAGE) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def snippet_of_readme() -> str:
    (found,) = re.findall(r"(?:^    .*\n)+", (ROOT / "README.md").read_text().partition("## From Python")[2], re.M)[:1]
    return textwrap.dedent(found)


def run_fresh(code: str, folder: Path) -> str:
    """Returns what the code prints, in a process in which nothing has happened and of whose devices nothing is said.
    XLA_FLAGS say how machine code is made (tests/conftest.py): a step compiles in a third of the time."""
    unset = {"JAX_PLATFORMS", "PJRT_NPROC"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return done.stdout


@pytest.mark.ci
def test_planning_explaining_and_tuning_start_no_backend(tmp_path):
    """A plan that started JAX would leave `train` one device instead of the simulated ones."""
    explained = "\n".join(f"meshloom.explain(*{words!r}).text\nassert not is_started(), {words!r}" for words in PLANS)
    run_fresh(f"{IS_STARTED}\nimport meshloom\n{explained}\n{TUNE}\nassert not is_started(), 'tune'", tmp_path)


@pytest.mark.ci
@pytest.mark.tpu
def test_the_snippet_of_the_readme(tmp_path):
    """As typed, with narrower models."""
    narrow = {"num_layers": 2, "embed_dim": 512, "mlp_dim": 1024, "vocab_size": 4096, "num_heads": 4, "num_kv_heads": 2}
    words = "model=llama3_8b", *(f"model.{key}={value}" for key, value in narrow.items())
    code = snippet_of_readme().replace('"model=llama3_8b"', ", ".join(map(repr, words)))
    code = code.replace('"num_steps=20"', f'"num_steps=20", {NARROW}')
    assert code.count("num_layers") == 2
    told = run_fresh(f"{code}\nprint(plan, run, step, sep='\\n')", tmp_path)
    assert re.search(r"<Plan: .*fsdp=64 on v5p-128.*\n<TrainedRun: 20 of 20 steps, .*\n<CompiledStep: .* fits>>", told)


@pytest.mark.ci
@pytest.mark.tpu
def test_a_step_of_ones_own_is_compiled_for_a_tpu_that_is_not_there(tmp_path):
    (code,) = blocks(ROOT / "docs" / "lower_ahead.md")
    told = run_fresh(code, tmp_path)
    assert "CompiledMemoryStats(" in told
    assert "all-gather over fsdp on ICI" in told


@pytest.mark.ci
def test_a_notebook_shows_results_once_and_nothing_else(tmp_path):
    """All examples of the page are one session, and an IPython kernel shows a plan, a step and a mistake."""
    mistake = 'meshloom.plan("model.embed_dim=100", "seed=x")'
    page = [text.replace('"data=synthetic"', f'"data=synthetic", {NARROW}') for text in blocks()]
    assert sum("num_layers=1" in text for text in page) == 1
    cells = [*page, "plan", "meshloom.explain(plan)", "print(meshloom.explain(plan).text)", "step", mistake]
    *of_page, plan, explained, text, step, wrong = run_cells(cells, tmp_path)
    for outputs in of_page:
        assert all((output.output_type, output.get("name")) == ("stream", "stdout") for output in outputs), outputs
    told = "".join(output.text for outputs in of_page for output in outputs)
    assert "<Plan: 8.03 B parameters, fsdp=64 on v5p-128" in told
    assert "seed\n  'x' is not a whole number" in told
    assert "<TrainedRun: 4 of 4 steps, loss" in told
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "the run that was asked for"
    for outputs, shown in ((plan, "<table"), (explained, "<table"), (step, "<iframe")):
        (only,) = outputs
        assert only.output_type == "execute_result"
        assert shown in only.data["text/html"]
    assert "estimated step" in "".join(output.text for output in text)
    (error,) = wrong
    assert error.ename == "ConfigError"
    assert error.traceback[0] == f"line 1: {mistake}"
    assert len(error.traceback) < 10
    assert "error: seed: 'x' is not a whole number" in "\n".join(error.traceback)
