"""What a restore is said to do is what the files of the checkpoint and JAX's own shardings say."""

import io
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from conftest import LINEAR_STACK, SMALL, plan_of, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.runtime.checkpoint.find import saved_tree
from meshloom.runtime.checkpoint.restore_plan import plan_restore
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.process_log import process_log
from meshloom.runtime.start.start import find_restorable
from meshloom.runtime.train.train import plan_and_check, run_training
from support.commands import run_in_process

RUN = (*LINEAR_STACK, "model.num_layers=1", "num_steps=2", "evaluation.num_batches=1", "logging=quiet")
SAVED = (*RUN, "target=cpu-4", "sharding=fsdp_tensor", "mesh.tensor=2")


def _train(run_dir: Path, *overrides: str) -> str:
    """Returns what a run in this process says."""
    job, said = plan_and_check(spec_of(*overrides)), io.StringIO()
    with process_log(run_dir, Processes()):
        assert run_training(job, run_dir, overrides=(), console=Console(said), processes=Processes()) == 0
    return said.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run of fsdp=2 x tensor=2."""
    run_dir = tmp_path_factory.mktemp("saved")
    assert "restore plan" not in _train(run_dir, *SAVED)
    return run_dir


def _planned(saved, *overrides: str):
    restored = (*overrides, f"checkpoint.restore_from={saved}")
    plan = plan_of(*restored)
    start = find_restorable(spec_of(*restored).checkpoint, plan.abstract)
    assert start is not None
    return plan, start, plan_restore(start, plan)


@pytest.mark.ci
def test_shards_are_those_of_the_files_and_of_jax(saved):
    plan, start, restore = _planned(saved, *RUN, "target=cpu-8", "sharding=fsdp", "mesh.fsdp=8")
    files = leaves_by_path(saved_tree(start.path))
    mesh = plan.mesh.of_devices(jax.devices())
    specs = leaves_by_path(plan.specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    assert len(restore.arrays) == 9  # three parameters, and two moments of each
    for each in restore.arrays:
        shape, on_disk = files[each.path].shape, files[each.path].storage_metadata.chunk_shape
        assert each.saved == tuple(size // chunk for size, chunk in zip(shape, on_disk, strict=True)), each.path
        on_devices = NamedSharding(mesh, specs[each.path]).shard_shape(shape)
        assert each.here == tuple(size // shard for size, shard in zip(shape, on_devices, strict=True)), each.path
    assert restore.saved_mesh == {"fsdp": 2, "tensor": 2}
    assert {each.path for each in restore.resharded} == {each.path for each in restore.arrays}


def test_on_the_same_mesh_all_are_laid_out_as_they_were_saved(saved):
    _, _, restore = _planned(saved, *SAVED)
    assert restore.resharded == ()
    assert restore.lines()[-1] == "fsdp=2 x tensor=2: all are laid out as they were saved"


def test_explain_shows_it_for_hardware_that_is_not_there(saved, tmp_path):
    words = (*SMALL, *RUN, "target=v5p-32", "precision=float32", "sharding.on_replicated=allow")
    done = run_in_process("explain", *words, f"checkpoint.restore_from={saved}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"restore plan: checkpoint 2 of {saved}: 9 arrays of " in done.stdout
    assert "fsdp=2 x tensor=2 -> fsdp=16: 9 arrays are laid out anew" in done.stdout
    assert "  params/embed/table_VE float32[264,32]: (2, 2) -> (1, 16) shards" in done.stdout
    assert "  and 3 more" in done.stdout


def test_explain_names_what_is_missing_and_what_has_another_shape(saved, tmp_path):
    words = (*SMALL, *RUN, "model.num_layers=2", "optimizer=sgd", f"checkpoint.restore_from={saved}")
    done = run_in_process("explain", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "params/layers/kernel_EM is float32[1,32,32] there, float32[2,32,32] here" in done.stderr
    assert "is there, not here" in done.stderr


def test_a_run_says_it_before_it_restores(saved, tmp_path):
    said = _train(tmp_path, *RUN, "target=cpu-2", f"checkpoint.restore_from={saved}", "num_steps=3")
    plan, _, continuing = said.partition("continuing after step 2")
    assert continuing
    assert "fsdp=2 x tensor=2 -> fsdp=2: 9 arrays are laid out anew" in plan
