"""A fingerprint: whatever changes a lowered program changes it, and the key that did so is named."""

import json
from dataclasses import asdict, replace

import jax
import pytest

from conftest import plan_of, spec_of
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.spec.plan_spec import PlanSpec
from meshloom.compiler.spec.step_spec import StepSpec
from meshloom.compiler.xla.programs import Fingerprint, Programs, differences, fingerprint_of, flat, lower

TINY = ("model.num_layers=1", "global_batch_size=8")

# Every key that is said to reach no program, with another value than it has in the runs of the tests.
OUTSIDE = (
    "run.name=other",
    "run.tags=[other]",
    "run.notes=other",
    "run.extra={name: other}",
    "launch=slurm",
    "launch.dry_run=true",
    "launch.program=other",
    "launch.setup=[other]",
    "launch.environment={A: 1}",
    "launch.directory=other",
    "sharding.replicated_bytes_threshold=70000000", "sharding.on_replicated=warn", "num_skips_allowed=3",
    "overlap.max_exposed=0.5", "pipeline.max_bubble=0.5",
    "overlap.search={max_candidates: 2, budget_seconds: 9, min_gain: 0}",
    "compilation_cache=elsewhere", "artifact=somewhere", "compile.timeout_seconds=9",
    "evaluation.every_num_steps=7", "evaluation.num_batches=3", "evaluation.split=all",
    "evaluation={tasks: [a], tasks_path: b, num_examples: 3, num_fewshot: 2}",
    "logging.every_num_steps=3", "logging.trackers=[]", "logging.layer_metrics=each", "logging.wandb.project=other",
    "logging.wandb.entity=other", "logging.wandb.mode=offline", "logging.mlflow.uri=other",
    "logging.mlflow.experiment=other", "watchdog.factor=3", "watchdog.min_seconds=3", "watchdog.abort=true",
    "generate={prompt: a, prompts: b, max_new_tokens: 3, temperature: 1, top_k: 2, top_p: 0.5, seed: 7, stop: [c]}",
    "generate.batch_size=2", "generate.chat=d",
    "export={format: orbax, directory: out, dtype: float32, max_shard_bytes: 9}",
    "profile.steps=[2,3]", "replay.spike_factor=3", "stragglers.every_num_steps=3", "stragglers.cost_share=0.3",
    "checkpoint.every_num_steps=3",
    "checkpoint.every_num_minutes=1.5", "checkpoint.keep=9", "checkpoint.keep_best=2",
    "checkpoint.keep_every_num_steps=4", "checkpoint.restore_from=there", "checkpoint.directory=there",
    "checkpoint.base_from=there",
    "distributed.cluster=slurm",
    "distributed.coordinator_address=a:1", "distributed.num_processes=2", "distributed.process_id=1",
    "distributed.local_device_ids=[0]", "distributed.initialization_timeout_seconds=1",
    "distributed.compile_timeout_seconds=1", "on_out_of_memory=try",
    "distributed.heartbeat_timeout_seconds=11", "distributed.shutdown_timeout_seconds=12", "shards.directory=there",
    "shards.num_tokens_per_shard=10", "shards.bpe_vocab_size=300", "shards.bpe_text_bytes=1000",
    "data=text_files", "data.source.paths=[x]", "data/tokenizer=sentencepiece", "data.tokenizer.path=x",
    "data.held_out_fraction=0.2", "data.held_out_by=position", "data.shuffle_seed=5",
    "data.num_epochs=2",
    "data.max_text_bytes=1000", "data.num_prefetch_threads=2", "data.num_prefetch_batches=9",
    "sweep.objective=mfu", "sweep.retry=[failed]", "tune.objective=cost", "tune.price_per_chip_hour={v5p: 1}",
    "tune.max_memory_share=0.5", "tune.groups.sharding=[fsdp]", "tune.groups.remat=[full]", "tune.groups.overlap=[xla]",
    "tune.mesh.tensor=[1]", "tune.microbatches=[1]", "tune.pin.remat=full", "tune.num_shown=3", "tune.num_compiled=1",
    "tune.device_orders=all", "device_order=[data]", "tune.max_candidates=9", "tune.num_trials=9",
    "tune.targets=[v5p-8]", "tune.tokens=1e9",
)  # fmt: skip


def fingerprint(*overrides: str) -> Fingerprint:
    return fingerprint_of_plan(plan_of(*TINY, *overrides))


def fingerprint_of_plan(plan: Plan) -> Fingerprint:
    mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
    return fingerprint_of(plan, lower(plan, mesh), mesh)


@pytest.fixture(scope="module")
def usual() -> Fingerprint:
    return fingerprint()


def keys_of_step(*overrides: str) -> dict[str, str]:
    return dict(flat(StepSpec.of(spec_of(*overrides)).as_compared()))


def test_the_step_has_keys_of_the_declaration_with_their_values():
    declared = dict(flat(spec_of(*TINY).as_compared()))
    assert keys_of_step(*TINY).items() <= declared.items()


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("more", [(), ("data=python", "data.source.object=a:B", "data.source.items=sequences")])
def test_passes_read_no_more_of_a_declaration_than_its_step_and_its_place(more):
    """The plan of nothing but the PlanSpec makes the same programs, with the same keys."""
    spec = spec_of(*TINY, *more)
    alone = PlanSpec.of(spec)
    assert type(alone.data) is not type(spec.data)
    assert fingerprint_of_plan(plan_run(alone)) == fingerprint_of_plan(plan_run(spec))


def test_keys_outside_of_the_program_do_not_change_it(usual):
    rate = f"optimizer.learning_rate={spec_of(*TINY).optimizer.learning_rate}"  # old weights have another by default
    others = (OUTSIDE, ("checkpoint.weights_from=there", "checkpoint.weights_skip=[x]", rate))  # one of the two places
    before, *after = (dict(flat(spec_of(*TINY, *more).model_dump(mode="json"))) for more in ((), *others))
    own_fields = ("target.", "mesh.", "compiler_options", "overlap.flag_presets", "overlap.pgle")
    unchanged = {
        key
        for key in before
        if all(each.get(key, ...) == before[key] for each in after) and not key.startswith(own_fields)
    }
    assert unchanged == set(keys_of_step(*TINY)), "OUTSIDE changes all others"
    assert fingerprint(*OUTSIDE).digest == usual.digest


@pytest.mark.cases(plain=3)
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=1", {"seed"}),
        ("optimizer.weight_decay=0.2", {"optimizer.weight_decay"}),
        ("num_steps=11", {"num_steps"}),  # by the schedule
        ("remat=full", {"remat.policy"}),
        ("data.isolate_documents=true", {"data.isolate_documents"}),
        ("data.packing=first_fit", {"data.packing"}),
        ("loss.max_logits_bytes=1000", {"loss.max_logits_bytes"}),
        ("mesh.fsdp=4 mesh.data=2", {"mesh.fsdp", "mesh.data"}),
        ("on_nonfinite=skip", {"on_nonfinite"}),
    ],
)
def test_what_changes_the_program_is_named(usual, override, named):
    changed = fingerprint(*override.split())
    assert changed.digest != usual.digest
    problems = differences(changed, usual, folder="the artifact", fix="x")
    assert {problem.where for problem in problems} - {"devices.arrangement"} == named


def test_two_edits_of_a_table_are_told_apart(tmp_path):
    """The declaration names the same file; what it said is part of the fingerprint. Spaces in it change
    nothing."""
    file = tmp_path / "own.csv"
    found = []
    for text in ("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n", "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n"):
        for spaced in (text, text.replace(",", " ,")):
            file.write_text(spaced)
            plan = plan_run(
                spec_of("mesh.stage=2", "num_microbatches=2", "model.num_layers=2", f"pipeline.table={file}")
            )
            mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
            found.append(fingerprint_of(plan, Programs({}, None, None, {}, {}, ()), mesh))
    first, same, other, _ = found
    assert same == first
    (problem,) = differences(replace(other, programs={"train": "0"}), replace(first, programs={"train": "1"}),
                             folder="the artifact", fix="compile it again")  # fmt: skip
    assert problem.where == "pipeline.table"
    assert str(file) in problem.what


def test_a_key_of_the_program_that_changes_nothing_is_no_difference(usual):
    """The mesh is compared as what it comes to, and logits that fit are not split whatever their limit."""
    same = fingerprint("mesh.fsdp=8", "loss.max_logits_bytes=300000000")
    assert same.spec != usual.spec
    assert same.digest == usual.digest
    assert differences(same, usual, folder="the artifact", fix="x") == []


def test_versions_options_and_devices_are_part_of_it(usual):
    for name, key, value in (
        ("environment", "jaxlib", "0.0.1"),
        ("compiler_options", "xla_embed_ir_in_executable", True),
        ("devices", "kind", "TPU v9"),
    ):
        other = replace(usual, **{name: {**getattr(usual, name), key: value}})
        assert other.digest != usual.digest
        (problem,) = differences(usual, other, folder="the artifact", fix="x")
        assert problem.where == f"{name}.{key}"
        assert str(value) in problem.what


def test_changed_code_is_told_as_such(usual):
    other = replace(usual, programs={**usual.programs, "train": "0" * 64})
    (problem,) = differences(usual, other, folder="the artifact", fix="x")
    assert problem.where == "artifact"
    assert "code" in problem.fix


def test_it_survives_json(usual):
    again = Fingerprint(**json.loads(json.dumps(asdict(usual))))
    assert again.digest == usual.digest
    assert differences(usual, again, folder="the artifact", fix="x") == []
