"""What is exported is what was imported, bit for bit; nothing half-written passes for whole."""

import json
import shutil
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from conftest import SMALL, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.driver import plan_run
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.cli.weights import open_merged
from meshloom.runtime.weights.export import SavedParams, prepare_export, run_export
from meshloom.runtime.weights.find import find_weights
from meshloom.runtime.weights.folder import open_folder
from meshloom.runtime.weights.load import load_params
from support.commands import run_in_process, run_python
from support.forked import start
from support.loops import NoData
from support.published import write_published

LLAMA = ("model.num_layers=2", "model.embed_dim=32", "model.num_kv_heads=4", "model.mlp_dim=40", "logging=quiet")
QUIET = Console(is_quiet=True)
MESHES = {
    "one device": ("target=cpu-1",),
    "fsdp x tensor": ("target=cpu-8", "sharding=fsdp_tensor", "mesh.tensor=4"),
}


def _saved(folder: Path, run_dir: Path, *overrides: str) -> dict[str, np.ndarray]:
    """Saves a checkpoint of a run that started from a folder. Returns its parameters."""
    spec = spec_of(*LLAMA, *overrides, f"checkpoint.weights_from=hf:{folder}")
    plan = plan_run(spec)
    weights = find_weights(plan)
    assert weights is not None
    params = load_params(plan, plan.mesh.of_devices(jax.devices()[: plan.target.num_devices]), weights, QUIET)
    with Checkpoints(run_dir, spec) as checkpoints:
        checkpoints.save(7, {"step": jnp.int32(7), "params": params}, NoData(), num_tokens=0, eval_loss=None)
    (run_dir / "spec.yaml").write_text(json.dumps(spec.as_written()))
    return {path: np.asarray(x) for path, x in leaves_by_path(params).items()}


def _job(run_dir: Path | str, out: Path, *overrides: str) -> Any:
    spec = spec_of(*LLAMA, f"checkpoint.weights_from={run_dir}", f"export.directory={out}", *overrides)
    return prepare_export(spec, open_merged)


def _contents(folder: Path) -> dict[str, bytes]:
    return {name: tensor.values().tobytes() for name, tensor in open_folder(folder).tensors.items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_published(folder, spec_of(*LLAMA).model, num_files=2)
    (folder / "tokenizer.json").write_text('{"of": "the origin"}')
    return folder


@pytest.fixture(scope="module")
def run(published, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    run_dir = tmp_path_factory.mktemp("run")
    return run_dir, _saved(published, run_dir, *MESHES["fsdp x tensor"])


def test_the_round_trip_is_exact_and_keeps_what_belongs_to_the_weights(published, run, tmp_path):
    run_export(_job(run[0], tmp_path / "out", "export.max_shard_bytes=20000"), QUIET)
    out = tmp_path / "out"
    assert _contents(out) == _contents(published)  # bfloat16 as in the origin, which is found by the run's declaration
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert all(path.stat().st_size < 25000 or b"embed" in path.read_bytes() for path in out.glob("*.safetensors"))
    assert (out / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    config, origin = (json.loads((folder / "config.json").read_text()) for folder in (out, published))
    assert config == origin
    assert {tensor.file.name for tensor in open_folder(out).tensors.values()} == {
        path.name for path in out.glob("*.safetensors")
    }
    assert not list(tmp_path.glob("*.unfinished"))
    assert not list(out.glob(".lock"))


@pytest.mark.ci
def test_the_round_trip_is_exact_from_one_device(published, tmp_path):
    _saved(published, tmp_path / "run", *MESHES["one device"])
    run_export(_job(tmp_path / "run", tmp_path / "out"), QUIET)
    assert _contents(tmp_path / "out") == _contents(published)


def test_another_type_is_that_of_numpy(published, run, tmp_path):
    run_export(_job(run[0], tmp_path / "out", "export.dtype=float32"), QUIET)
    for name, tensor in open_folder(published).tensors.items():
        values = open_folder(tmp_path / "out").tensors[name].values()
        assert values.dtype == np.float32
        assert np.array_equal(values, tensor.values().astype(np.float32)), name


def test_our_own_names_hold_whole_stacks(run, tmp_path):
    job = _job(run[0], tmp_path / "out", "export.format=safetensors", "export.dtype=float32")
    run_export(job, QUIET)
    (tmp_path / "out/config.json").write_text("{}")  # the reader wants one; the format has none
    found = {name: tensor.values() for name, tensor in open_folder(tmp_path / "out").tensors.items()}
    assert found.keys() == {path.replace("/", ".") for path in run[1]}
    for path, x in run[1].items():
        assert np.array_equal(found[path.replace("/", ".")], x), path


def test_a_published_folder_is_written_in_another_type_and_other_files(published, tmp_path):
    run_export(_job(f"hf:{published}", tmp_path / "out", "export.dtype=float32"), QUIET)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    for name, tensor in open_folder(published).tensors.items():
        assert np.array_equal(open_folder(tmp_path / "out").tensors[name].values(), tensor.values().astype(np.float32))


KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "vocab.json",
        "chat_template.jinja", "README.md", "LICENSE", "modeling_own.py", "tekken.json", "added_tokens.json",
        "additional_chat_templates/tools.jinja")  # fmt: skip
LEFT = ("pytorch_model.bin", "model.gguf", "tf_model.h5", "onnx/model.onnx", ".gitattributes", "training_args.bin")
OLD = {"_attn_implementation_autoset": True, "_own": [1], "id2label": {"0": "a"}, "use_cache": False,
       "auto_map": {"AutoModel": "modeling_own.Own"}, "quantization_config": None, "hidden_act": "silu"}  # fmt: skip


def test_all_that_was_published_with_the_weights_is_exported(published, tmp_path):
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    shutil.copytree(published, theirs)
    for name in (*KEPT, *LEFT):
        (theirs / name).parent.mkdir(exist_ok=True)
        (theirs / name).write_bytes(name.encode())
    config = json.loads((theirs / "config.json").read_text()) | OLD
    old = {key: value for key, value in config.items() if key not in ("dtype", "rope_parameters")}
    (theirs / "config.json").write_text(json.dumps(old))
    job = _job(f"hf:{theirs}", out)
    assert any(line.startswith("not copied: the folders ") for line in job.said)
    run_export(job, QUIET)
    for name in KEPT:
        assert (out / name).read_bytes() == name.encode()
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names == {*KEPT, "config.json", "export.json", "model.safetensors"}
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in old} == old


def test_a_head_that_differs_from_the_tied_table_is_refused_or_kept_apart(tmp_path):
    theirs, tied = tmp_path / "theirs", spec_of(*LLAMA, "model.embeddings=tied").model
    head = write_published(theirs, tied)["model.embed_tokens.weight"].copy()
    rest = theirs / "model.safetensors"
    whole = load_file(rest)
    save_file(whole | {"lm_head.weight": head}, rest)
    _job(f"hf:{theirs}", tmp_path / "out", "model.embeddings=tied")
    head[-1, -1] += 1
    save_file(whole | {"lm_head.weight": head}, rest)
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from model.embed_tokens.weight") as raised:
        _job(f"hf:{theirs}", tmp_path / "out", "model.embeddings=tied")
    assert "model.embeddings=separate; or leave it out: checkpoint.weights_skip=[lm_head.weight]" in str(raised.value)
    skip = "checkpoint.weights_skip=[lm_head.weight]"
    run_export(_job(f"hf:{theirs}", tmp_path / "left", "model.embeddings=tied", skip), QUIET)
    assert "lm_head.weight" not in open_folder(tmp_path / "left").tensors
    run_export(_job(f"hf:{theirs}", tmp_path / "apart", "model.embeddings=separate"), QUIET)
    assert np.array_equal(open_folder(tmp_path / "apart").tensors["lm_head.weight"].values(), head)
    assert json.loads((tmp_path / "apart/config.json").read_text())["tie_word_embeddings"] is False
    with pytest.raises(ConfigError, match="leaves out weights that the folder to write has to hold"):
        _job(f"hf:{theirs}", tmp_path / "out", "model.embeddings=separate", skip)


def test_files_that_are_whole_stay_and_others_are_written_again(published, run, tmp_path):
    job = _job(run[0], tmp_path / "out", "export.max_shard_bytes=20000")
    run_export(job, QUIET)
    (tmp_path / "out").rename(tmp_path / "out.unfinished")
    files = sorted((tmp_path / "out.unfinished").glob("*.safetensors"))
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    files[1].unlink()
    before = {path.name: path.stat().st_ino for path in files[2:]}
    run_export(job, QUIET)
    assert _contents(tmp_path / "out") == _contents(published)
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in before} == before


WRONG = {
    "no directory": (("export.directory=null",), "export.directory: is missing"),
    "no weights": (("checkpoint.weights_from=null",), "names no weights to export"),
    "another model": (("model.mlp_dim=48",), "layers/mlp/gate_EM is [2, 32, 40] there, [2, 32, 48] here"),
    "a model of no family": (("model.mlp=plain",), "mlp"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_found_before_anything_is_written(run, tmp_path, wrong):
    overrides, said = WRONG[wrong]
    with pytest.raises(ConfigError) as raised:
        _job(run[0], tmp_path / "out", *overrides)
    assert said in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_else_is_left_alone(run, tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        run_export(_job(run[0], tmp_path), QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_numbers_that_another_type_makes_infinite_are_refused(tmp_path):
    write_published(tmp_path / "hf", spec_of(*LLAMA).model, dtype="float32", scale=1e5)
    with pytest.raises(ConfigError, match="infinite in float16"):
        run_export(_job(f"hf:{tmp_path / 'hf'}", tmp_path / "out", "export.dtype=float16"), QUIET)
    assert not (tmp_path / "out").exists()


SLOW = """
    import sys, time
    from dataclasses import replace
    from meshloom.compiler.core.console import Console
    from meshloom.compiler.declare.compose import Request, read_spec
    from meshloom.runtime.cli.weights import open_merged
    from meshloom.runtime.weights.export import prepare_export, run_export

    def slowed(tensor):
        def parts():
            for part in tensor.parts():
                time.sleep(0.05)
                yield part
        return replace(tensor, parts=parts)

    job = read_spec(Request(tuple(sys.argv[1:])), then=lambda spec: prepare_export(spec, open_merged))
    run_export(replace(job, tensors=tuple(map(slowed, job.tensors))), Console())
"""


@pytest.mark.ci
def test_a_killed_export_leaves_nothing_that_passes_for_whole_and_goes_on(published, run, tmp_path):
    out, unfinished = tmp_path / "out", tmp_path / "out.unfinished"
    words = [*SMALL, *LLAMA, f"checkpoint.weights_from={run[0]}", f"export.directory={out}"]
    command = ["-c", textwrap.dedent(SLOW), *words, "export.max_shard_bytes=20000"]
    kept = set[str]()
    for num_files in (0, 2):
        process = start(command, stdout=None, stderr=None)
        while not unfinished.is_dir() or len(list(unfinished.glob("*.safetensors"))) < num_files:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
        with pytest.raises(ConfigError):
            open_folder(unfinished)
        there = {path.name for path in unfinished.glob("*.safetensors")}
        assert there >= kept
        kept = there
    assert kept
    assert run_python(*command).returncode == 0
    assert _contents(out) == _contents(published)
    assert not unfinished.exists()


@pytest.mark.ci
def test_an_adapter_that_the_command_trained_is_merged_into_its_base_which_may_move(published, tmp_path):
    shutil.copytree(published, tmp_path / "base")
    words = (*SMALL, *LLAMA, "model.dropout_rate=0", "adapter=lora", "num_steps=2", "schedule.num_warmup_steps=0")
    more = ("target=cpu-8", "optimizer.learning_rate=0.1", "checkpoint.weights_from=hf:base")
    done = run_in_process("train", *words, *more, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "base").rename(tmp_path / "moved")
    export = ("export", "run", "directory=out", "dtype=float32")
    done = run_in_process(*export, cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no such folder now" in done.stderr
    assert "fix: name the folder to which it moved: model.path=DIR" in done.stderr
    done = run_in_process(*export, "model.path=moved", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/tokenizer.json").is_file()
    base, merged = open_folder(published).tensors, open_folder(tmp_path / "out").tensors
    saved, spec = SavedParams(tmp_path / "run/checkpoints/2"), yaml.safe_load((tmp_path / "run/spec.yaml").read_text())
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        a, b = (saved.read(f"layers/adapter/mlp/up_EM/lora_{part}", (layer,)).astype(np.float64) for part in "AB")
        change = spec["adapter"]["alpha"] / spec["adapter"]["rank"] * (a @ b).T
        assert np.abs(change).max() > 0.01
        assert np.allclose(merged[name].values(), base[name].values().astype(np.float64) + change, atol=1e-6)
        norm = f"model.layers.{layer}.input_layernorm.weight"
        assert np.array_equal(merged[norm].values(), base[norm].values().astype(np.float32))
