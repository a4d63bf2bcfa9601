"""The devices and types of published weights on a machine without an accelerator, where the declaration leaves them."""

import json

import pytest

from conftest import spec_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.compositions import forget_compositions
from meshloom.compiler.spec import attached
from meshloom.models.published import write_config

FASTER, DECLARED = ("cpu-1", "float32"), ("cpu-8", "bfloat16")


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Returns what reads overrides beside those of a published model, on a machine without an accelerator."""
    model = spec_of("model=llama3_8b", "model.num_layers=1").model
    (tmp_path / "config.json").write_text(json.dumps(write_config(model, dtype="bfloat16", max_length=64)))
    monkeypatch.setattr(attached, "attached_kinds", tuple)
    monkeypatch.setattr(attached, "_platforms", lambda: "")
    attached.automatic.cache_clear()
    forget_compositions()
    yield lambda *more: read_spec(Request(("model=from_hf", f"model.path={tmp_path}", *more)), then=lambda spec: spec)
    attached.automatic.cache_clear()
    forget_compositions()


@pytest.mark.cases(plain=5)
@pytest.mark.parametrize(("overrides", "chosen", "said"), [
    ((), FASTER, ("one device", "float32", "target=cpu-8 or precision=bfloat16")),
    (("adapter=lora",), FASTER, ("float32",)),
    (("precision=bfloat16",), ("cpu-1", "bfloat16"), ("one device", "target=cpu-8")),
    (("precision.compute=bfloat16",), ("cpu-1", "bfloat16"), ("one device",)),
    (("target=cpu-1",), FASTER, ("float32", "; precision=bfloat16 sets")),
    (("target=cpu-1", "precision=bfloat16"), ("cpu-1", "bfloat16"), None),
    (("target=cpu-8",), DECLARED, None),
    (("target=auto",), FASTER, ("one device",)),
    (("sharding=fsdp",), DECLARED, None),
    (("mesh.tensor=2",), DECLARED, None),
    (("mesh=fsdp_tensor",), DECLARED, None),
    (("target=v5e-4",), ("v5e-4", "bfloat16"), None),
    (("target=v5e-1",), ("v5e-1", "bfloat16"), None),
])  # fmt: skip
def test_published_weights_take_one_device_and_float32_unless_words_say_otherwise(read, overrides, chosen, said):
    spec = read(*overrides)
    assert (spec.target.name, spec.precision.compute) == chosen
    assert (spec.chosen_here is None) == (said is None)
    assert all(text in spec.chosen_here for text in said or ())


@pytest.mark.parametrize(("variables", "overrides", "chosen"), [
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, (), DECLARED),
    ({"PMI_SIZE": "2"}, (), DECLARED),
    ({"JAX_COORDINATOR_ADDRESS": "host0:8476"}, (), DECLARED),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, (), DECLARED),
    ({"SLURM_NTASKS": "1"}, (), FASTER),
    ({"SLURM_NTASKS": ""}, (), FASTER),
    ({"SLURM_NTASKS": "2"}, ("distributed=alone",), FASTER),
    ({}, ("distributed.num_processes=2",), DECLARED),
    ({}, ("distributed.heartbeat_timeout_seconds=10",), FASTER),
])  # fmt: skip
def test_several_processes_have_devices_to_divide(read, monkeypatch, variables, overrides, chosen):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = read(*overrides)
    assert (spec.target.name, spec.precision.compute) == chosen


@pytest.mark.usefixtures("read")
def test_a_model_that_is_drawn_keeps_its_simulated_devices():
    for words, target in (((), "cpu-8"), (("target=cpu-1",), "cpu-1")):
        spec = read_spec(Request(words), then=lambda spec: spec)
        assert (spec.target.name, spec.precision.compute, spec.chosen_here) == (target, "bfloat16", None)


def test_an_accelerator_is_used_as_declared(read, monkeypatch):
    monkeypatch.setattr(attached, "attached_kinds", lambda: ("gpu",))
    monkeypatch.setattr(attached, "is_installed", lambda _: True)
    attached.automatic.cache_clear()
    spec = read()
    assert (spec.target.name, spec.precision.compute, spec.chosen_here) == ("local", "bfloat16", None)


def test_a_run_says_that_a_typed_calibration_is_left_out_and_only_then(read):
    assert "calibration=auto is left out" in read("target=v5e-4", "calibration=auto").chosen_here
    assert read("target=v5e-4").chosen_here is None
    assert read("target=v5e-4", "calibration=none").chosen_here is None
    both = read("calibration=auto").chosen_here
    assert both.startswith(f"{read().chosen_here}; calibration=auto")
