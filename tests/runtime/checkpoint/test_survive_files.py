"""Damage in any file of a checkpoint is found or harmless; what is kept is what was asked for."""

import json
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest

from conftest import plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore, set_aside
from meshloom.runtime.checkpoint.find import describe_damage, finished, parse_place
from meshloom.runtime.checkpoint.restore_plan import tree_differences
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.core.files import FILE, FileEntry, remove_for_good
from meshloom.runtime.data import open_data
from meshloom.runtime.rundir.folders import CHECKPOINTS
from meshloom.runtime.start.start import find_checkpoint
from support.loops import NoData
from support.programs import programs_of

SMALLEST = ("target=cpu-2", "model.num_layers=1", "sharding=fsdp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints behind one step and behind two, the programs, and the values of both."""
    run_dir, plan = tmp_path_factory.mktemp("saved"), plan_of(*SMALLEST)
    programs, batches, values = programs_of(plan), iter(open_data(plan.spec)["train"]), {}
    state = programs["init"]()
    with Checkpoints(run_dir, plan.spec) as checkpoints:
        for step in (1, 2):
            batch = next(batches)
            placed = {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}
            state, _ = programs["train"](state, placed)
            values[step] = jax.tree.map(np.asarray, state)
            checkpoints.save(step, state, batches, num_tokens=0, eval_loss=None)
    return run_dir, plan, programs, values


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _remove(path: Path) -> None:
    path.unlink()


@pytest.mark.ci
@pytest.mark.parametrize(
    "damage", [_flip, _remove, *(pytest.param(damage, marks=pytest.mark.release) for damage in (_truncate, _empty))]
)
def test_damage_in_any_file_is_found_or_harmless(saved, tmp_path, damage):
    run_dir, plan, programs, values = saved
    newest = run_dir / CHECKPOINTS / "2"
    names = [path.relative_to(newest) for path in sorted(newest.rglob("*")) if path.is_file()]
    assert len(names) >= 12
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(run_dir, copy)
        damage(copy / CHECKPOINTS / "2" / name)
        start = find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
        assert start
        if start.step == 2:
            assert len(name.parts) == 1, f"{name} is watched"
        else:
            assert start.step == 1
            (what,) = start.damaged.values()
            assert str(name) in what or name.name == FILE
        batches = iter(open_data(plan.spec)["train"])
        restored = restore(start, programs.state, batches)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored.state), values[start.step])
        assert batches.get_state() == {"next_batch": start.step}
        set_aside(start.damaged)
        with Checkpoints(copy, plan.spec) as checkpoints:
            assert checkpoints.latest_step == start.step
            checkpoints.save(3, restored.state, batches, num_tokens=0, eval_loss=None)
        again = find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
        assert (again.step, again.damaged) == (3, {})  # pyright: ignore[reportOptionalMemberAccess]


def _without(manifest: bytes, name: str) -> bytes:
    value = json.loads(manifest)
    value["files"] = {path: entry for path, entry in value["files"].items() if name not in path}
    return json.dumps(value).encode()


def _with(manifest: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(manifest) | changes).encode()


MANIFESTS = {
    "{}": lambda _: b"{}",
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "empty": lambda _: b"",
    "cut off": lambda manifest: manifest[: len(manifest) // 2],
    "NUL": lambda manifest: bytes(len(manifest)),
    "UTF-16": lambda manifest: manifest.decode().encode("utf-16"),
    "not UTF-8": lambda manifest: manifest.replace(b"state", b"st\xffte"),
    "deep": lambda _: b"[" * 100_000,
    "no files": lambda manifest: _with(manifest, files={}),
    "files a list": lambda manifest: _with(manifest, files=[]),
    "entries empty": lambda manifest: _with(manifest, files={path: {} for path in json.loads(manifest)["files"]}),
    "no arrays": lambda manifest: _without(manifest, "/d/"),
    "no data": lambda manifest: _without(manifest, "data"),
    "no version": lambda manifest: json.dumps(json.loads(manifest)["files"]).encode(),
    "other version": lambda manifest: _with(manifest, version=3),
    "other step": lambda manifest: _with(manifest, step=3),
    "step a text": lambda manifest: _with(manifest, step="2"),
}


@pytest.mark.cases(plain=6)
@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_manifest_that_was_changed_vouches_for_nothing(saved, tmp_path, damage):
    run_dir, plan, _, _ = saved
    shutil.copytree(run_dir, tmp_path / "run")
    manifest = tmp_path / "run" / CHECKPOINTS / "2" / FILE
    manifest.write_bytes(MANIFESTS[damage](manifest.read_bytes()))
    start = find_checkpoint(tmp_path / "run", plan.spec.checkpoint, plan.abstract)
    assert start
    assert start.step == 1
    assert [path.name for path in start.damaged] == ["2"]


def test_hidden_files_beside_those_of_a_checkpoint_are_no_damage(saved, tmp_path):
    run_dir, plan, _, _ = saved
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / CHECKPOINTS / "2" / "state" / ".DS_Store").write_text("left by a file manager")
    start = find_checkpoint(tmp_path / "run", plan.spec.checkpoint, plan.abstract)
    assert start
    assert (start.step, start.damaged) == (2, {})


def test_a_checkpoint_is_of_the_step_that_was_saved_whatever_its_folder_is_called(saved, tmp_path):
    run_dir, plan, _, _ = saved
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / CHECKPOINTS / "2").rename(copy / CHECKPOINTS / "7")
    start = find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
    assert start
    assert (start.step, describe_damage(start.damaged)) == (1, "checkpoint 7: it was saved as step 2")
    shutil.rmtree(copy / CHECKPOINTS / "1")
    with pytest.raises(RunFailed, match="checkpoint 7: it was saved as step 2"):
        find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
    with pytest.raises(RunFailed, match="checkpoint 7: it was saved as step 2"):
        find_checkpoint(
            tmp_path, spec_of(*SMALLEST, f"checkpoint.restore_from={copy}/{CHECKPOINTS}/7").checkpoint, plan.abstract
        )


METADATA = {
    "a list": "[]",
    "a number": "7",
    "null": "null",
    "a field of another type": '{"init_timestamp_nsecs": []}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", METADATA)
def test_a_file_that_the_manifest_leaves_out_may_hold_anything(saved, tmp_path, text):
    run_dir, plan, programs, values = saved
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / CHECKPOINTS / "2" / "_CHECKPOINT_METADATA").write_text(METADATA[text])
    start = find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
    assert start
    restored = restore(start, programs.state, NoData())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored.state), values[start.step])


def test_a_checkpoint_that_lies_elsewhere_is_started_from_but_not_managed(saved, tmp_path):
    """A link cannot be deleted as a folder is, which Orbax would find out in the middle of the run."""
    run_dir, plan, programs, values = saved
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    link = copy / CHECKPOINTS / "2"
    link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"checkpoints/2: is a symbolic link"):
        find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
    other = find_checkpoint(tmp_path, spec_of(*SMALLEST, f"checkpoint.restore_from={link}").checkpoint, plan.abstract)
    assert other
    restored = restore(other, programs.state, NoData())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored.state), values[2])


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_only_has_the_name_of_a_step_is_set_aside(saved, tmp_path, make):
    run_dir, plan, _, _ = saved
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    make(copy / CHECKPOINTS / "3")
    start = find_checkpoint(copy, plan.spec.checkpoint, plan.abstract)
    assert start
    assert start.step == 2
    set_aside(start.damaged)
    with Checkpoints(copy, plan.spec) as checkpoints:
        assert checkpoints.latest_step == 2
        checkpoints.save(3, {"x": jax.numpy.ones(3)}, NoData(), num_tokens=0, eval_loss=None)
    assert sorted(path.name for path in (copy / CHECKPOINTS).iterdir()) == ["2", "3", "3.damaged"]


def test_a_run_goes_on_from_the_newest_good_checkpoint_or_the_one_that_is_named(saved, tmp_path):
    run_dir, plan, _, _ = saved
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)

    def step_from(place: object) -> int:
        start = find_checkpoint(
            tmp_path / "new", spec_of(*SMALLEST, f"checkpoint.restore_from={place}").checkpoint, plan.abstract
        )
        assert start
        assert not start.is_own
        return start.step

    assert step_from(other) == step_from(other / CHECKPOINTS) == step_from(other / CHECKPOINTS / "2") == 2
    assert step_from(other / CHECKPOINTS / "1") == 1
    _flip(other / CHECKPOINTS / "2" / "data" / "data.json")
    assert step_from(other) == 1
    with pytest.raises(RunFailed, match=r"checkpoint 2: the content of data/data\.json has changed"):
        step_from(other / CHECKPOINTS / "2")
    assert sorted(path.name for path in (other / CHECKPOINTS).iterdir()) == ["1", "2"]  # another run's are left alone
    (other / CHECKPOINTS / "1" / FILE).unlink()
    with pytest.raises(RunFailed, match=r"checkpoint 1: it has no manifest\.json"):
        step_from(other)


def test_a_place_is_a_run_or_one_of_its_checkpoints():
    assert parse_place("a/run") == (Path("a/run/checkpoints"), None)
    assert parse_place("a/run/checkpoints/") == (Path("a/run/checkpoints"), None)
    assert parse_place("a/run/checkpoints/200") == (Path("a/run/checkpoints"), 200)
    assert parse_place("outputs/200") == (Path("outputs/200/checkpoints"), None)


def test_the_newest_checkpoint_is_the_one_of_most_steps(tmp_path):
    for name in ("9", "10", "100", "11.damaged", "12.orbax-checkpoint-tmp-1"):
        (tmp_path / name).mkdir()
    assert [path.name for path in finished(tmp_path)] == ["100", "10", "9"]
    assert list(finished(tmp_path / "none")) == []


def _kept(folder: Path, losses: list[float | None], *overrides: str, reopen: bool = False) -> list[int]:
    """Save a checkpoint for each held-out loss, at steps 10, 20, ..; the steps that stay."""
    spec = spec_of(*SMALLEST, "checkpoint.every_num_steps=10", "evaluation.every_num_steps=10", *overrides)
    state = {"x": jax.numpy.ones(3)}
    checkpoints = Checkpoints(folder, spec)
    for number, loss in enumerate(losses):
        checkpoints.save(10 * (number + 1), state, NoData(), num_tokens=0, eval_loss=loss)
        checkpoints.wait()
        if reopen:
            checkpoints = Checkpoints(folder, spec)
    return sorted(int(path.name) for path in (folder / CHECKPOINTS).iterdir())


@pytest.mark.parametrize("reopen", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_what_is_kept_is_what_was_asked_for(tmp_path, reopen):
    losses = [3.0, 1.0, 2.0, None, 4.0, float("nan")]
    for number, (overrides, kept) in enumerate(
        [
            (["checkpoint.keep=2"], [50, 60]),
            (["checkpoint.keep=1", "checkpoint.keep_best=1"], [20, 60]),
            (["checkpoint.keep=1", "checkpoint.keep_best=2"], [20, 30, 60]),
            (["checkpoint.keep=1", "checkpoint.keep_every_num_steps=20"], [20, 40, 60]),
            (["checkpoint.keep=2", "checkpoint.keep_best=1", "checkpoint.keep_every_num_steps=40"], [20, 40, 50, 60]),
        ]
    ):  # fmt: skip
        assert _kept(tmp_path / str(number), losses, *overrides, reopen=reopen) == kept, overrides


def test_trees_differ_in_lines_that_name_each_array():
    def tree(**leaves: tuple[tuple[int, ...], str]):
        return {name: {"w": jax.ShapeDtypeStruct(*leaf)} for name, leaf in leaves.items()}

    there = tree(same=((2,), "float32"), gone=((2,), "float32"), shape=((2, 3), "float32"), type=((2,), "float32"))
    here = tree(same=((2,), "float32"), new=((), "int32"), shape=((3, 2), "float32"), type=((2,), "bfloat16"))
    assert tree_differences({"params": there}, {"params": here}) == [
        "params/gone/w float32[2] is there, not here",
        "params/new/w int32[] is not there, but here",
        "params/shape/w is float32[2,3] there, float32[3,2] here",
        "params/type/w is float32[2] there, bfloat16[2] here",
    ]
    assert tree_differences(there, there) == []


def test_a_checkpoint_of_other_types_is_refused(saved):
    run_dir, plan, _, _ = saved
    halves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), plan.abstract)
    with pytest.raises(ConfigError, match=r"is float32\[264,32\] there, bfloat16\[264,32\] here"):
        find_checkpoint(run_dir, plan.spec.checkpoint, halves)


def test_a_directory_that_its_writers_bring_back_is_removed_again(tmp_path):
    directory = tmp_path / "4.unfinished"

    def write_late():
        for k in range(3):
            with suppress(FileNotFoundError):  # it was removed in between
                (directory / "d").mkdir(parents=True, exist_ok=True)
                (directory / "d" / str(k)).write_text("late")
            time.sleep(0.3)

    directory.mkdir()
    writer = threading.Thread(target=write_late)
    writer.start()
    remove_for_good(lambda: tmp_path.glob("*.unfinished"))
    writer.join()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_a_checkpoint_may_have_any_size():
    assert FileEntry.model_validate_json('{"bytes": 1099511627776, "sha256": ""}').bytes == 2**40
