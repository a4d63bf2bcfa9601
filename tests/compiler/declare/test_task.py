"""The learning rate and the steps of a line that names none."""

from typing import get_args

import pytest

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.task import TASKS, _rates, task_of
from meshloom.compiler.spec.objective_spec import OBJECTIVES

LORA, DPO = "adapter=lora", ("objective=dpo", "data=preferences", "data.source.paths=[a]", "data.tokenizer.path=a")


def _spec(*words):
    return read_spec(Request(words), then=lambda spec: spec)


@pytest.mark.parametrize(("words", "rate"), [
    ((), 3e-3),
    (("checkpoint.weights_from=run",), 2e-5),
    (("checkpoint.restore_from=run",), 3e-3),  # it goes on with what that began
    (("checkpoint.restore_from=hf:folder",), 2e-5),
    ((LORA, "checkpoint.weights_from=run"), 2e-4),
    (DPO, 1e-6),
    ((*DPO, LORA), 1e-6),
    ((LORA, "optimizer.learning_rate=1e-3"), 1e-3),
    (("optimizer=lion", LORA), 7e-5),
])  # fmt: skip
def test_the_rate_is_that_of_the_task(words, rate):
    assert _spec(*words).optimizer.learning_rate == rate


def test_every_optimizer_has_a_rate_for_each_task_below_that_of_drawn_weights():
    for name, rates in _rates().items():
        assert tuple(rates) == TASKS
        assert rates["pretraining"] > rates["adapter"] > rates["fine_tuning"] > rates["preferences"] > 0
        assert _spec(f"optimizer={name}").optimizer.learning_rate == rates["pretraining"]


def test_steps_are_counted_only_where_epochs_are_given_and_steps_are_not():
    assert (_spec().num_steps, _spec().counts_epochs) == (300, False)
    assert _spec("data.num_epochs=3").counts_epochs
    assert not _spec("data.num_epochs=3", "num_steps=10").counts_epochs
    assert not _spec("data.num_epochs=3").model_copy(update={"num_steps": 10}).counts_epochs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_says_what_a_run_with_it_is_for(objective):
    (kind,) = get_args(objective.model_fields["kind"].annotation)
    assert task_of({"objective": {"kind": kind}}) == ("preferences" if objective.compares_pairs else "pretraining")
