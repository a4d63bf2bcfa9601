"""The command line as its users type it, in processes of its own."""

import os
import subprocess
import sys

import pytest
import yaml

from conftest import SMALL
from meshloom.runtime.cli import COMMANDS

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # those of the tests


def meshloom(*args: str, cwd=None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    line = [sys.executable, "-m", "meshloom", *args]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT | env, timeout=300, check=False
    )


def test_help_imports_nothing_heavy():
    code = "import sys; from meshloom.runtime.cli import run; run(['--help']); print([m for m in ('jax', 'hydra', 'flax', 'rich', 'pydantic') if m in sys.modules])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in COMMANDS)


def test_an_unknown_command_is_one_error():
    done = meshloom("trian")
    assert done.returncode == 2
    fix = f"use one of {', '.join(COMMANDS)} (did you mean 'train'?)"
    assert done.stderr == f"error: there is no command 'trian'\n  fix: {fix}\n"


def test_train_help_lists_every_group_and_option_a_line_each():
    lines = meshloom("train", "--help").stdout.splitlines()
    for group, options in {
        "model": ["tiny", "llama3_8b", "llama3_70b", "llama3_405b", "linear_stack"], "target": ["cpu-N", "local"],
        "mesh": ["ddp", "fsdp", "tensor", "fsdp_tensor", "zero1", "zero2", "hsdp"],
        "sharding": ["ddp", "fsdp", "tensor", "fsdp_tensor", "zero1", "zero2", "hsdp"],
        "precision": ["float32", "bfloat16", "bfloat16_params", "bfloat16_pure", "float16"],
        "remat": ["none", "full", "save_dots", "save_names", "offload"],
        "optimizer": ["adamw", "adafactor", "lion", "muon", "sgd"], "schedule": ["constant", "cosine", "linear", "wsd"],
        "data": ["python_stdlib", "synthetic"], "checkpoint": ["every_100", "disabled"],
        "distributed": ["auto", "alone"], "logging": ["default", "quiet"], "experiment": ["smoke"],
    }.items():  # fmt: skip
        at = lines.index(f"{group}=")
        listed = [line for line in lines[at + 1 : at + 12] if line.startswith("  ")]
        for option in options:
            line = next(line for line in listed if line.split()[0] == option)
            assert len(line.split()) >= 3, f"{line} says what it is"


def test_mistakes_are_told_at_once_and_leave_nothing(tmp_path):
    for command in ("train", "explain"):
        done = meshloom(command, "model.layrs=3", "global_batch_size=12", "sharding=fsdq", "seed=x", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("error: ") == 3  # the batch rests on the sharding, which is not known
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_checked_before_it_starts(tmp_path):
    done = meshloom("train", "-m", "sharding=ddp,fsdq", "model.layrs=1,2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 2
    assert list(tmp_path.iterdir()) == []


def test_cfg_prints_the_whole_config(tmp_path):
    done = meshloom("train", "--cfg", "job", "optimizer.learning_rate=1e-4", "mesh.tensor=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["optimizer"]["learning_rate"] == 1e-4
    assert config["mesh"]["tensor"] == 2
    part = meshloom("train", "--cfg", "job", "-p", "remat", cwd=tmp_path).stdout
    assert yaml.safe_load(part) == {"policy": "none", "stacks": {}, "names": []}
    assert meshloom("train", "--cfg", "job", "seedd=1", cwd=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_configs_are_found(tmp_path):
    own = tmp_path / "it's mine" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# mine\ndefaults: [tiny, _self_]\nnum_layers: 5\n")
    done = meshloom("explain", "model=mine", "--config-dir", str(own.parent), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "layers 5 [1]  embed 128 fsdp [0]  mlp 384 [1]" in done.stdout
    done = meshloom("explain", "model=mien", "--config-dir", str(own.parent), cwd=tmp_path)
    assert "did you mean 'mine'?" in done.stderr
    (own / "mine.yaml").write_text("num_layers: [5\n")
    done = meshloom("explain", "model=mine", "--config-dir", str(own.parent), cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    done = meshloom("explain", "--config-dir", "nowhere", cwd=tmp_path)
    assert "there is no directory nowhere" in done.stderr


def test_a_sweep_runs_each_point_in_its_own_process(tmp_path):
    done = meshloom("explain", "-m", "target=cpu-2,cpu-64", "sharding=ddp", "global_batch_size=64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "data=2, 2 devices" in done.stdout
    assert "data=64, 64 devices" in done.stdout
    assert "2 of 2 runs done" in done.stdout


def test_a_failed_point_does_not_end_a_sweep(tmp_path):
    batch = "global_batch_size=8,12"  # each value is right for some mesh, the second for none of these
    done = meshloom("explain", "-m", batch, "target=cpu-8", cwd=tmp_path)
    assert done.returncode == 2
    assert "1 of 2 runs done" in done.stdout
    assert "global_batch_size=12" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("meshloom tr", "train"),
        ("meshloom train remat=f", "remat=full"),
        ("meshloom train optimizer.le", "optimizer.learning_rate="),
        ("meshloom explain sharding=fsdp model=llama3_4", "model=llama3_405b"),
        ("meshloom train target=", "target=cpu-8"),
    ],
)
def test_the_shell_completes(line, expected):
    done = meshloom("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert expected in done.stdout.split(), done.stderr


def test_installing_completion_prints_a_script():
    assert "complete -o nospace" in meshloom("train", "-sc", "install=bash").stdout


def test_info_shows_where_configs_come_from(tmp_path):
    assert "pkg://meshloom.conf" in meshloom("train", "--info", "searchpath", cwd=tmp_path).stdout


def test_too_many_simulated_devices_are_refused(tmp_path):
    done = meshloom("train", "target=cpu-4096", "global_batch_size=4096", cwd=tmp_path)
    assert done.returncode == 2
    assert "meshloom explain" in done.stderr


def test_an_unwritable_directory_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    done = meshloom("train", *SMALL, "experiment=smoke", "hydra.run.dir=file/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "file" in done.stderr
