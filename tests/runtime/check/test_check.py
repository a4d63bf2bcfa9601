"""A check passes for a declaration that is right, and names what is wrong (bench/check_faults.py: of steps)."""

from dataclasses import replace

import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.parallel.quantized import _Product
from meshloom.compiler.step.train_step import GRADIENTS, NUM_TARGETS
from meshloom.models import IGNORED_TARGET
from meshloom.runtime.check import check_files
from meshloom.runtime.check.check import DeclarationCheck
from meshloom.runtime.check.programs import Compiler
from meshloom.runtime.data import packing
from meshloom.runtime.weights import export

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def check():
    plan = plan_of(
        "target=cpu-2", "sharding=fsdp", "num_microbatches=2", "model.embeddings=tied",
        "data.packing=first_fit", "data.isolate_documents=true",
    )  # fmt: skip
    check = DeclarationCheck(plan, "a test")
    with Compiler() as compiler:
        check.start(compiler)
        check.compile_all()
        yield check


@pytest.fixture
def by_name(monkeypatch):
    monkeypatch.setattr(check_files, "transformers_logits", lambda *_: pytest.fail("not in this test"))
    monkeypatch.setattr("meshloom.runtime.check.check.find_spec", {}.get)
    return lambda lines: {line.name: line for line in lines}


def test_a_declaration_that_is_right_passes(check, by_name):
    found = by_name(check.lines())
    assert [line.name for line in found.values() if line.status == "failed"] == []
    not_run = {name for name, line in found.items() if line.status == "not run"}
    assert not_run == {"precision", "matmuls", "context", "stages", "auxiliary", "logits", "weights"}
    assert all(found[name].why for name in not_run)
    assert found["gradients"].measured < found["gradients"].tolerance < 1e-2


def test_a_wrong_gradient_is_named_with_what_splits_it(check, by_name):
    before, (state, metrics) = check.steps, check.steps[0]
    wrong = dict(metrics[GRADIENTS]["layers"]["mlp"])
    wrong["up_EM"] = wrong["up_EM"] * 1.01
    layers = {**metrics[GRADIENTS]["layers"], "mlp": wrong}
    metrics = {**metrics, GRADIENTS: {**metrics[GRADIENTS], "layers": layers}, NUM_TARGETS: metrics[NUM_TARGETS] + 1}
    check.steps = ((state, metrics), *before[1:])
    try:
        found = by_name(check.of_step())
    finally:
        check.steps = before
    assert [line.name for line in found.values() if line.status == "failed"] == ["gradients", "counts"]
    line = found["gradients"]
    assert (line.parameter, line.split) == ("layers/mlp/up_EM", "dimension 1 over fsdp")
    assert line.measured == pytest.approx(0.01, rel=0.01)


def test_positions_that_go_on_are_found(check, monkeypatch):
    right = packing._documents

    def go_on(lengths, length):
        return right(lengths, length) | {"positions": np.arange(length, dtype=np.int32)}

    monkeypatch.setattr(packing, "_documents", go_on)
    assert check.targets().status == "passed"
    monkeypatch.setattr(check, "batches", check.data.batches())
    assert "positions" in check.targets().why  # rotary positions alone are relative: no loss changes


def test_documents_that_see_each_other_are_found(check, monkeypatch):
    right = packing._documents

    def as_one(lengths, length):
        row = right(lengths, length)
        return row | {"segment_ids": np.minimum(row["segment_ids"], 1)}

    monkeypatch.setattr(packing, "_documents", as_one)
    assert check.packed().status == "passed"
    monkeypatch.setattr(check, "batches", check.data.batches())
    assert check.packed().status == "failed"


def test_last_targets_that_are_missing_or_wrong_are_found(check, monkeypatch):
    """A cut document's last target is the first token of what was cut off, which its own sequence does not hold."""
    right = packing.TokenStream.is_document_end
    monkeypatch.setattr(packing.TokenStream, "is_document_end", lambda self, stops: right(self, stops) | True)
    monkeypatch.setattr(check, "batches", check.data.batches())
    assert "last targets" in check.targets().why


def test_masks_that_are_late_are_found(check, monkeypatch):
    right = packing.TokenStream.targets
    monkeypatch.setattr(packing.TokenStream, "targets", lambda self, tokens, start: right(self, tokens, start - 1))
    monkeypatch.setattr(check, "batches", check.data.batches())
    found = check.targets()
    assert found.status == "failed"
    assert str(IGNORED_TARGET) not in found.why
    assert "not to be learnt" in found.why


def test_weights_that_an_export_changes_are_found(check, by_name, monkeypatch):
    right = export.published_values
    monkeypatch.setattr(export, "published_values", lambda tensor, source: right(tensor, source) * np.float32(1.001))
    found = by_name(check.in_files())
    assert found["export"].status == "failed"
    assert found["checkpoint"].status == found["resume"].status == "passed"


def test_what_is_saved_is_compared_bit_by_bit(check, by_name, monkeypatch):
    right = check_files.restore

    def other(*operands):
        found = right(*operands)
        return replace(found, state=found.state | {"step": found.state["step"] + 1})

    monkeypatch.setattr(check_files, "restore", other)
    found = by_name(check.in_files())
    assert found["checkpoint"].status == "failed"
    assert "step differs" in found["checkpoint"].why


def test_scales_of_each_devices_own_tokens_are_found(monkeypatch):
    check = DeclarationCheck(plan_of("target=cpu-2", "sharding=fsdp", "precision=fp8", "precision.emulate=true"), "")
    with Compiler() as compiler:
        check.start(compiler)
        assert check.matmuls().status == "passed"
        monkeypatch.setattr(_Product, "_axes", lambda *_: ())
        del check.in_few_bits
        assert check.matmuls().status == "failed"
