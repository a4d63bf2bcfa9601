"""`meshloom explain` says whether the step fits, last, and gives an exit code where it is asked to."""

import shlex

import pytest

from meshloom.runtime.cli.main import run
from meshloom.runtime.train.display import warnings_of_demo_data
from support.programs import plan_as_declared

LARGE = ("model=llama3_8b", "model.num_layers=2", "target=v5e-4", "global_batch_size=4", "sequence_length=256")


@pytest.mark.parametrize(
    ("words", "exit_code", "verdict"),
    [
        ((*LARGE, "--check"), 0, "fits: "),
        ((*LARGE, "global_batch_size=4096", "--check"), 3, "does not fit: "),
        pytest.param((*LARGE, "global_batch_size=4096"), 0, "does not fit: ", marks=pytest.mark.ci),
    ],
)
def test_the_verdict_ends_it_and_check_makes_it_the_exit_code(words, exit_code, verdict, capsys):
    assert run(["explain", *words]) == exit_code
    lines = capsys.readouterr().out.splitlines()
    fixes = [line for line in lines if line.startswith("  fix: ")]
    assert lines[-1 - len(fixes)].startswith(verdict)
    assert bool(fixes) == (verdict != "fits: ")


@pytest.mark.ci
def test_its_first_fix_fits(capsys):
    words = (*LARGE, "global_batch_size=4096")
    run(["explain", *words])
    fix = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  fix: "))
    assert "  saves " in fix
    assert ", fits; a token takes " in fix
    assert run(["explain", *words, *shlex.split(fix.removeprefix("  fix: ").split("  saves ")[0]), "--check"]) == 0


def test_check_of_a_sweep_is_refused(capsys):
    assert run(["explain", "-m", "seed=1,2", "--check"]) == 2
    assert "fix: leave out --check, or -m" in capsys.readouterr().err


@pytest.mark.ci
def test_experts_show_the_usual_imbalance_first_and_label_the_declared_step(capsys):
    words = ("model=mixtral_8x7b", "model.num_layers=2", "target=v5p-16", "sharding=fsdp_expert", "mesh.expert=4")
    assert run(["explain", *words, "global_batch_size=16", "sequence_length=2048"]) == 0
    lines = capsys.readouterr().out.splitlines()
    usual = next(n for n, line in enumerate(lines) if line.startswith("estimated step with room for 1.25 times"))
    assert "moe.max_imbalance=1.25" in lines[usual]
    assert lines[usual + 1].startswith("as declared, with room for any imbalance: ")


def test_a_large_model_on_the_default_data_is_warned_of_by_both_names():
    large = plan_as_declared(*LARGE)
    (warning,) = warnings_of_demo_data(large)
    assert "python_stdlib" in warning.what
    assert "num_steps=300" in warning.what
    assert not warnings_of_demo_data(plan_as_declared(*LARGE, "data=synthetic"))
    assert not warnings_of_demo_data(plan_as_declared("target=v5e-4"))
