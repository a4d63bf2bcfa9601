"""`overlap.max_exposed`: what it lets through, and what it says of the rest."""

import random
import re
from dataclasses import replace

import pytest

from conftest import plan_of
from meshloom.compiler.analysis.lint import TOO_EXPOSED, find_too_exposed, least_batch
from meshloom.compiler.core.errors import EXPOSED
from meshloom.compiler.core.known import Unknown, each_known
from meshloom.compiler.schema import CollectiveReport, StepReport
from meshloom.compiler.spec.step_spec import StepSpec
from support import reports
from support.commands import meshloom
from support.traffic import origin

WEIGHT, ACTIVATION = "layers/mlp/up_EM, backward", "jit(step)/attend/dot_general, forward"
UNTIMED = Unknown("simulated devices have no links")
TARGET = ("target=h100-8", "sharding=fsdp")


def collective(alone: float, exposed: float | Unknown, source: str = WEIGHT) -> CollectiveReport:
    example = reports.fits()[0].collectives[0]
    hidden = each_known(exposed, lambda seconds: alone - seconds)
    return replace(example, alone_seconds=alone, exposed_seconds=exposed, hidden_seconds=hidden, origin=origin(source))


def step(compute: float, exposed: float | Unknown) -> StepReport:
    share = each_known(exposed, lambda seconds: seconds / (compute + seconds))
    return reports.fits()[0].compiled.model_copy(
        update={"compute_seconds": compute, "exposed_seconds": exposed, "exposed_fraction": share}
    )


def demand(share: float):
    return plan_of(*TARGET, f"overlap.max_exposed={share}")


def test_nothing_is_said_where_nothing_is_demanded_or_it_is_met():
    exposed = (step(9.0, 1.0), [collective(2.0, 1.0)])
    assert find_too_exposed(plan_of(*TARGET), *exposed) is None
    assert find_too_exposed(demand(0.1), *exposed) is None
    found = find_too_exposed(demand(0.0999), *exposed)
    assert found is not None
    assert found.rule == TOO_EXPOSED
    assert "10.0 %" in found.what
    assert WEIGHT in found.where


@pytest.mark.parametrize("exposed", [(step(9.0, UNTIMED), []), (step(9.0, 0.0), [collective(1.0, UNTIMED)])])
def test_what_is_not_known_is_not_delivered(exposed):
    found = find_too_exposed(demand(0.5), *exposed)
    assert found is not None
    assert "not known" in found.what


def test_link_bound_names_the_batch_that_could_hide_it():
    plan = demand(0.02)
    batch = plan.spec.global_batch_size
    # Twice as long on the link as compute takes: a little less than twice the batch, as 2 % may stay.
    found = find_too_exposed(plan, step(1.0, 1.0), [collective(2.0, 1.0)])
    assert found is not None
    assert f"global_batch_size={2 * batch}" in found.fix
    assert least_batch(plan, 1.0, [collective(2.0, 1.0)], 0.5) == batch, "half of the step may be exposed"
    # What grows with the batch leaves less room: 1.5 of weights beside 0.5 of activations is three times the batch.
    growing = [collective(1.5, 0.5), collective(0.5, 0.5, ACTIVATION)]
    assert least_batch(plan, 1.0, growing, 0.0) == 3 * batch
    assert least_batch(plan, 1.0, [collective(0.1, 0.1), collective(1.0, 1.0, ACTIVATION)], 0.0) is None


def test_what_could_hide_it_is_a_search_and_after_one_a_longer_one():
    told = []
    for is_searched in (False, True):
        found = find_too_exposed(demand(0.02), step(9.0, 1.0), [collective(2.0, 1.0)], is_searched=is_searched)
        assert found is not None
        told.append(found.fix)
    assert "try overlap=auto" in told[0]
    assert "overlap=auto" not in told[1]
    assert "a larger overlap.search.max_candidates" in told[1]


def test_copies_to_the_host_are_named_apart_and_have_a_remedy_of_their_own():
    """Where they are most of what is exposed, or more than is allowed by themselves, no batch helps: they grow with it,
    as compute does."""
    copied = replace(collective(5.0, 0.6), kind="copy-to-host", mesh_axes=("host",), link="host link")
    found = []
    for of_host, limit in ((0.6, 0.08), (0.4, 0.03), (0.4, 0.05)):
        exposed = step(9.0, 1.0).model_copy(update={"exposed_by_axes": {"fsdp": 1 - of_host, "host": of_host}})
        one = find_too_exposed(demand(limit), exposed, [collective(2.0, 0.4), copied])
        assert one is not None
        found.append(one)
    first, second, third = found
    assert "10.0 % of the step is exposed (400 ms of communication, 600 ms of host copies)" in first.what
    assert first.fix.startswith("communication takes 2.00 s by itself")
    assert "copies to and from the host take 5.00 s by themselves: keep more on the device" in first.fix
    assert "keep more on the device" in second.fix, "4 % of the step, of which 3 % are allowed"
    assert "keep more on the device" not in third.fix


def test_the_batch_that_is_named_leaves_room_for_the_copies():
    weights, copies, limit = 2.0, 0.05, 0.1
    plan = plan_of(*TARGET, "global_batch_size=4096", "sequence_length=8", f"overlap.max_exposed={limit}")
    exposed = step(1.0, 1.05).model_copy(update={"exposed_by_axes": {"fsdp": 1.0, "host": copies}})
    found = find_too_exposed(plan, exposed, [collective(weights, 1.0)])
    assert found is not None
    named = re.search(r"global_batch_size=(\d+) could", found.fix)
    assert named is not None
    grown = int(named[1]) / plan.spec.global_batch_size
    assert weights - grown + grown * copies <= limit * (weights + grown * copies)


@pytest.mark.parametrize("seed", range(20))
def test_at_the_least_batch_the_link_is_hidden_and_below_it_is_not(seed):
    draw = random.Random(seed)
    plan = plan_of(*TARGET, "global_batch_size=4096", "sequence_length=8")
    weights, activations, limit = draw.uniform(0.1, 5), draw.uniform(0, 0.9), draw.choice([0.0, 0.02, 0.2])
    found = least_batch(plan, 1.0, [collective(weights, 0.0), collective(activations, 0.0, ACTIVATION)], limit)
    assert found is not None

    def least_share(batch: int) -> float:
        """Exposed of the step, where all that can be hidden is."""
        grown = batch / 4096
        exposed = max(0.0, weights + grown * activations - grown)
        return exposed / (grown + exposed)

    assert least_share(found) <= limit + 1e-9
    if found > 4096:
        assert least_share(found - 8) > limit


@pytest.mark.ci
def test_the_demand_is_an_exit_code(tmp_path):
    small = ("model.embed_dim=32", "model.num_layers=2", "data=synthetic", "num_steps=2", "overlap.max_exposed=0.02")
    done = meshloom("compile", *small, "hydra.run.dir=run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (EXPOSED, "")
    assert "overlap.max_exposed allows 2.0 %" in done.stdout
    assert "train it" not in done.stdout
    assert (tmp_path / "run/report.json").exists()
    assert not (tmp_path / "run/artifact").exists()
    trained = meshloom("train", *small, "checkpoint=disabled", "hydra.run.dir=trained", cwd=tmp_path)
    assert trained.returncode == 0
    assert "warning: overlap.max_exposed: is not judged by" in trained.stdout


def test_a_demand_changes_no_program():
    assert StepSpec.of(demand(0.3).spec) == StepSpec.of(plan_of(*TARGET).spec)
