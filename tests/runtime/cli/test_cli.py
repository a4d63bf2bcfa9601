"""The command line as its users type it: in this process, but for what is of processes."""

import inspect
import os
import re
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from conftest import SMALL
from meshloom import __version__
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.runtime.cli.app import parse_flags
from meshloom.runtime.cli.commands import COMMANDS
from meshloom.runtime.cli.main import run
from meshloom.runtime.train.display import next_steps
from support.commands import meshloom, run_in_process
from support.forked import start


@pytest.mark.parametrize("command", [None, *(name for name, one in COMMANDS.items() if one.paths)])
def test_help_fits_80_columns(capsys, command):
    assert run([*([command] if command else []), "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert f"usage: meshloom {command or 'COMMAND'} " in out


def test_every_command_of_the_registry_is_there_and_is_told_alike_everywhere():
    """One table says what there is: the usage, a command's help, the shell's completion, and what is run."""
    usage, offered = run_in_process().stdout, run_in_process("-sc", "query=bash", COMP_LINE="meshloom ").stdout
    assert offered.split() == [*COMMANDS]
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.description)}$", usage, re.M)
        first = run_in_process(name, "--help").stdout.splitlines()[0]
        assert first == f"meshloom {name}: {command.description}" or command.paths
        parameters = [*inspect.signature(command.load()).parameters]
        assert parameters == (["words"] if command.paths else ["request", "flags"])


def test_a_reader_that_has_gone_away_is_no_crash():
    """As of `| head`."""
    gone, ours = os.pipe()
    os.close(gone)
    with start(["-m", "meshloom", "--help"], stdout=ours) as process:
        os.close(ours)
        _, err = process.communicate()
    assert (process.returncode, err) == (1, "")


def test_an_unknown_command_is_one_error():
    done = run_in_process("trian")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no command 'trian'\n  fix: did you mean 'train'? use one of train, ")
    assert done.stderr.count("\n") == 2


def test_train_help_lists_every_group_and_option_a_line_each():
    lines = run_in_process("train", "--help", "all").stdout.splitlines()
    for group, options in {
        "model": ["tiny", "llama3_8b", "llama3_70b", "llama3_405b", "linear_stack"], "target": ["cpu-N", "local"],
        "mesh": ["ddp", "fsdp", "tensor", "fsdp_tensor", "hsdp"],
        "sharding": ["ddp", "fsdp", "tensor", "fsdp_tensor", "zero1", "zero2", "hsdp"],
        "precision": ["float32", "bfloat16", "bfloat16_params", "bfloat16_pure", "float16"],
        "remat": ["none", "minimal", "full", "save_dots", "save_names", "offload"],
        "optimizer": ["adamw", "adafactor", "lion", "muon", "sgd"], "schedule": ["constant", "cosine", "linear", "wsd"],
        "data": ["python_stdlib", "synthetic"], "checkpoint": ["every_100", "disabled"],
        "distributed": ["auto", "alone"], "logging": ["default", "quiet"],
        "experiment": ["smoke", "llama_128k_v5p"],
    }.items():  # fmt: skip
        at = lines.index(f"{group}=")
        listed = list(takewhile(lambda line: line.startswith("  "), lines[at + 1 :]))
        for option in options:
            line = next(line for line in listed if line.split()[0] == option)
            assert len(line.split()) >= 3, f"{line} says what it is"


def test_mistakes_are_told_at_once_and_leave_nothing(tmp_path):
    for command in ("train", "explain"):
        done = run_in_process(command, "model.layrs=3", "global_batch_size=12", "sharding=fsdq", "seed=x", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("error: ") == 3  # the batch rests on the sharding, which is not known
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_checked_before_it_starts(tmp_path):
    done = run_in_process("train", "-m", "sharding=ddp,fsdq", "model.layrs=1,2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 2
    assert list(tmp_path.iterdir()) == []


def test_cfg_prints_the_whole_config(tmp_path):
    done = run_in_process("train", "--cfg", "job", "optimizer.learning_rate=1e-4", "mesh.tensor=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["optimizer"]["learning_rate"] == 1e-4
    assert config["mesh"]["tensor"] == 2
    part = run_in_process("train", "--cfg", "job", "-p", "remat", cwd=tmp_path).stdout
    assert yaml.safe_load(part) == {"policy": "none", "stacks": {}, "names": [], "choices": {}}
    assert run_in_process("train", "--cfg", "job", "seedd=1", cwd=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_configs_are_found(tmp_path):
    own = tmp_path / "it's mine" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# mine\ndefaults: [tiny, _self_]\nnum_layers: 5\n")
    done = run_in_process("explain", "model=mine", "--config-dir", str(own.parent), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "layers 5 [1]  embed 128 fsdp [0]  mlp 384 [1]" in done.stdout
    done = run_in_process("explain", "model=mien", "--config-dir", str(own.parent), cwd=tmp_path)
    assert "did you mean 'mine'?" in done.stderr
    (own / "mine.yaml").write_text("num_layers: [5\n")
    done = run_in_process("explain", "model=mine", "--config-dir", str(own.parent), cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_in_process("explain", "--config-dir", "nowhere", cwd=tmp_path)
    assert "there is no directory nowhere" in done.stderr


def test_help_describes_a_users_own_options(tmp_path):
    for name, text in {
        "model/mine.yaml": "# @package _group_\n# Half of the layers\ndefaults: [tiny, _self_]\n",
        "team/search.yaml": "# @package run.extra.team\n# Of the search team\nowner: ada\n",
    }.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    lines = run_in_process("train", "--help", "all", "--config-dir", "conf", cwd=tmp_path).stdout.splitlines()
    assert "mine Half of the layers" in [" ".join(line.split()) for line in lines]
    assert lines[lines.index("team=") + 1] == "  search  Of the search team"
    assert next(line for line in lines if line.startswith("  tiny ")).endswith("(default)")


def test_a_users_own_keys_and_groups_are_kept_and_others_refused(tmp_path):
    (tmp_path / "team").mkdir()
    (tmp_path / "team/search.yaml").write_text("# @package run.extra.team\nowner: ada\n")
    (tmp_path / "team/known.yaml").write_text("# @package _global_\nseed: 7\n")
    (tmp_path / "team/bare.yaml").write_text("owner: ada\n")

    def spec(*overrides: str) -> RunSpec:
        return read_spec(Request(tuple(search_path_override(overrides, str(tmp_path)))), then=lambda spec: spec)

    own = spec("team=search", "run.name=baseline", "run.tags=[a,b]", "run.notes='a sentence'")
    assert own.run.extra == {"team": {"owner": "ada"}}
    assert (own.run.name, own.run.tags, own.run.notes) == ("baseline", ("a", "b"), "a sentence")
    assert spec("+team=known").seed == 7
    assert spec().run.extra == {}
    with pytest.raises(ConfigError) as error:
        spec("team=bare", "run_name=x")
    assert {problem.where: problem.fix for problem in error.value.problems}["team"] == (
        "begin its files with `# @package run.extra.team`, or `# @package _global_` for keys that there are"
    )
    assert [problem.where for problem in error.value.problems] == ["team", "run_name"]


@pytest.mark.ci
def test_a_point_of_a_sweep_that_fails_ends_no_other(tmp_path):
    """Each batch is right for some mesh; the second for none of these."""
    line = ("explain", "-m", "global_batch_size=8,12", "sharding=ddp", "target=cpu-8")
    done = meshloom(*line, cwd=tmp_path)
    assert done.returncode == 2
    assert "2 points: 1 done, 1 refused" in done.stdout
    assert "refused  global_batch_size=12  global_batch_size: 12 sequences are not divisible" in done.stdout
    (plan,) = tmp_path.glob("multirun/*/*/global_batch_size=8/plan.txt")
    assert "data=8, 8 devices" in plan.read_text()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("meshloom tr", "train"),
        ("meshloom train remat=f", "remat=full"),
        ("meshloom train optimizer.le", "optimizer.learning_rate="),
        ("meshloom explain sharding=fsdp model=llama3_4", "model=llama3_405b"),
        ("meshloom train target=", "target=cpu-8"),
        ("meshloom train data=", "data=jsonl"),
    ],
)
def test_the_shell_completes_and_offers_no_parts(line, expected):
    done = run_in_process("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    words = done.stdout.split()
    assert expected in words, done.stderr
    assert not [word for word in words if word.split("=")[-1].startswith("_")]


@pytest.mark.cases(plain=6)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--num_steps", "20"], ["there is no flag '--num_steps'", "settings have no dashes: num_steps=20"]),
        (["--num-steps=20"], ["there is no flag '--num-steps'", "settings have no dashes: num_steps=20"]),
        (["--lerning-rate", "1e-3"], ["settings have no dashes: optimizer.learning_rate=1e-3"]),
        (["--sharding", "fsdp"], ["settings have no dashes: sharding=fsdp"]),
        (["--frobnicate"], ["there is no flag '--frobnicate'", "`--cfg job` prints all keys"]),
        (["-n", "4"], ["there is no flag '-n'"]),
        (["--resume"], ["type the same line again with hydra.run.dir=RUN_DIR"]),
        (["--config-dir"], ["argument --config-dir", "expected one argument"]),
        (["--experimental-rerun", "x"], ["not supported"]),
        (["num_steps=1", "--sharding", "fsdp", "seed=1"], ["settings have no dashes: sharding=fsdp"]),
        (["--seed", "1", "--seed", "2"], ["seed=1", "seed=2"]),
        (["--seed=1", "--seed"], ["seed=1", "seed=..."]),
        (["--config-path", ""], ["--config-path: is empty"]),
        (["--config-name="], ["--config-name: is empty"]),
        (["-p", "model"], ["--package: chooses a part of what --cfg shows", "add --cfg job"]),
        (["--seed", "1", "model.layrs=3", "--steps"], ["seed=1", "model.layrs: there is no such key", "'--steps'"]),
    ],
)
def test_a_flag_that_is_none_is_one_error_in_our_words(flags, told, tmp_path):
    done = run_in_process("train", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert all(text in done.stderr for text in told), done.stderr
    assert "usage:" not in done.stderr
    num_told = 3 if "model.layrs=3" in flags else max(1, sum(flag.startswith("--seed") for flag in flags))
    assert done.stderr.count("error: ") == done.stderr.count("fix: ") == num_told
    assert list(tmp_path.iterdir()) == []


def test_overrides_may_stand_on_both_sides_of_a_flag():
    shown = run_in_process(
        "train", "num_steps=7", "--cfg", "job", "seed=3", "-p", "run.extra", "run.extra.rate=9", "--resolve"
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    flags, problems = parse_flags(COMMANDS["train"], ["seed=1", "--cfg", "job", "num_steps=7", "--resolve", "seed=2"])
    assert (flags.overrides, problems) == (["seed=1", "num_steps=7", "seed=2"], [])


def test_a_package_that_is_not_there_is_a_mistake(capfd):
    assert run(["train", "--cfg", "job", "-p", "nobody"]) == 2
    out, err = capfd.readouterr()
    assert "package 'nobody' not found" in out + err
    assert "sys.exit" not in out + err


def test_the_version_is_ours_wherever_it_is_asked_for():
    for line in (["--version"], ["train", "--version"]):
        assert run_in_process(*line).stdout == f"meshloom {__version__}\n"


def test_what_to_try_next_is_said_once_and_to_people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = Path("outputs/2026-01-01/10-00-00"), Path("outputs/2026-01-02/10-00-00")
    (first / "checkpoints").mkdir(parents=True)
    Path("outputs/latest").symlink_to("2026-01-01/10-00-00")  # as a run leaves it
    (name, line), *others = next_steps(first, ["num_steps=3"], is_saved=True, is_terminal=True)
    assert (name, line) == ("try: its text", f"meshloom generate {first} 'prompt=def '")
    assert others == [*next_steps(first, ["num_steps=3"], is_saved=False, is_terminal=True)] != []
    assert not next_steps(first, [], is_saved=True, is_terminal=False)
    assert not next_steps(first, ["hydra.run.dir=multirun/0"], is_saved=True, is_terminal=True), "a point of a sweep"
    second.mkdir(parents=True)
    assert not next_steps(second, [], is_saved=True, is_terminal=True)


def test_installing_completion_prints_a_script():
    assert "complete -o nospace" in run_in_process("train", "-sc", "install=bash").stdout


def test_info_shows_where_configs_come_from(tmp_path):
    assert "pkg://meshloom.conf" in run_in_process("train", "--info", "searchpath", cwd=tmp_path).stdout


def test_too_many_simulated_devices_are_refused(tmp_path):
    done = run_in_process("train", "target=cpu-4096", "global_batch_size=4096", cwd=tmp_path)
    assert done.returncode == 2
    assert "meshloom explain" in done.stderr


@pytest.mark.ci
def test_an_unwritable_directory_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_in_process("train", *SMALL, "experiment=smoke", "hydra.run.dir=file/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "file" in done.stderr


@pytest.mark.parametrize("command", ["train", "compile"])
def test_a_log_that_cannot_be_written_is_one_error(command, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").touch()
    done = run_in_process(command, "target=cpu-8", "data=synthetic", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2
    problem, fix = done.stderr.splitlines()
    assert problem.endswith("run/logs: File exists")
    assert fix == "  fix: move the file that is there, or choose another hydra.run.dir"


@pytest.mark.ci
def test_points_of_a_sweep_do_not_share_a_directory(tmp_path):
    """The second would go on from the checkpoint of the first."""
    done = meshloom("explain", "-m", "seed=1,2", "num_steps=3,4", "hydra.sweep.subdir=${seed}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.count("num_steps=4  several points of the sweep would share the directory") == 2
    assert "4 points: 2 done, 2 refused" in done.stdout


@pytest.mark.parametrize("override", ["hydra.job_logging.root.level=NOPE", "hydra.job_logging.version=7"])
def test_logging_that_cannot_be_set_up_is_one_error(override, tmp_path):
    done = run_in_process("train", "target=cpu-8", "data=synthetic", override, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: hydra.job_logging: cannot be set up: " in done.stderr
    assert "Traceback" not in done.stderr
