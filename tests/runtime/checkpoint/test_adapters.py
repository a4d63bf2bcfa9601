"""A checkpoint of an adapter holds what is trained, and knows its base by a digest of the bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.models.adapter import is_adapter, saved_part
from meshloom.runtime.checkpoint.adapters import base_of, check_base, check_encoding, digest_of, read_base, with_base
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore
from meshloom.runtime.checkpoint.find import Checkpoint
from meshloom.runtime.data import open_data
from meshloom.runtime.start.start import declared_start, find_checkpoint
from meshloom.runtime.weights.write import check_peft
from support.experts import MOE
from support.programs import on_devices, programs_of

ADAPTER = (*LINEAR_STACK, "adapter=lora", "adapter.rank=4", "schedule.num_warmup_steps=0")


def test_a_digest_is_of_the_values_and_their_places_in_any_layout_and_type():
    x = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 6)), jnp.bfloat16), np.float32)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    layouts = [PartitionSpec(), PartitionSpec("a", "b"), PartitionSpec(None, ("b", "a"))]
    laid_out = [{"w": jax.device_put(x, NamedSharding(mesh, layout))} for layout in layouts]
    digests = {digest_of(each) for each in (*laid_out, {"w": jnp.asarray(x)}, {"w": jnp.asarray(x, jnp.bfloat16)})}
    assert len(digests) == 1
    swapped, one, flipped = x[[1, 0, 2, 3]], x.copy(), x.copy()
    one[3, 7, 5] = np.nextafter(one[3, 7, 5], np.float32(9))
    flipped[0, 0, 0], flipped[2, 3, 4] = x[2, 3, 4], x[0, 0, 0]
    others = [{"w": jnp.asarray(each)} for each in (swapped, one, flipped, -x)] + [{"v": jnp.asarray(x)}]
    assert len(digests | {digest_of(each) for each in others}) == 1 + len(others)


@pytest.mark.ci
def test_adapters_are_saved_alone_and_restored_beside_their_base(tokens, tmp_path):
    plan = plan_of(*ADAPTER)
    programs, batches = programs_of(plan), iter(open_data(plan.spec)["train"])
    state = programs["init"]()
    fresh = jax.tree.map(jnp.copy, state["params"])
    for batch in tokens[:2]:
        state, _ = programs["train"](state, on_devices(programs, batch))
    trained = {path: np.array(x) for path, x in leaves_by_path(state).items()}
    with Checkpoints(tmp_path, plan.spec) as checkpoints:
        checkpoints.base = base_of(None, state["params"])
        checkpoints.save(2, state, batches, num_tokens=0, eval_loss=None)
    start = find_checkpoint(tmp_path, plan.spec.checkpoint, plan.abstract)
    assert isinstance(start, Checkpoint)
    restored = restore(start, programs.state, batches)
    saved = leaves_by_path(restored.state)
    assert saved.keys() == leaves_by_path(saved_part(plan.abstract)).keys()
    assert all(is_adapter(path.removeprefix("params/")) for path in saved if path.startswith("params/"))
    whole = restored.state | {"params": with_base(restored.state["params"], fresh)}
    assert jax.tree.structure(whole) == jax.tree.structure(plan.abstract)
    for path, x in leaves_by_path(whole).items():
        np.testing.assert_array_equal(np.array(x), trained[path], err_msg=path)
    check_base(start, whole["params"], read_base(start))
    fresh["head"]["kernel_EV"] = fresh["head"]["kernel_EV"].at[0, 0].add(1)
    with pytest.raises(ConfigError, match="an adapter of another base"):
        check_base(start, with_base(restored.state["params"], fresh), read_base(start))
    encoded = "adapter.base={element: nf4, block: 4, scales_block: null}"
    with pytest.raises(ConfigError, match="trained over a base stored as null"):  # before any compile
        declared_start(plan_of(*ADAPTER, f"checkpoint.restore_from={tmp_path}", encoded))
    with pytest.raises(ConfigError, match="holds another model or optimizer"):
        find_checkpoint(tmp_path, plan_of(*LINEAR_STACK).spec.checkpoint, plan_of(*LINEAR_STACK).abstract)


def _base_of(words: str) -> Any:
    adapter = spec_of("adapter=lora", words).adapter
    return adapter.base if adapter else None


def test_an_adapter_goes_on_over_a_base_that_is_stored_as_it_was(tmp_path):
    nf4 = "adapter.base={element: nf4, block: 4, scales_block: null}"
    before = _base_of(nf4)
    assert before
    there = {"encoding": before.model_dump(mode="json")}
    start = Checkpoint(tmp_path, 1, is_own=True, damaged={})
    check_encoding(start, there, before)
    check_encoding(start, {"place": None}, None)  # of a run that could not encode its base
    int8 = _base_of("adapter.base={element: int8, block: null, scales_block: null}")
    for here, words in ((int8, "{element: int8, block: null, scales_block: null}"), (None, "null")):
        with pytest.raises(ConfigError, match=r"adapter\.base") as found:
            check_encoding(start, there, here)
        assert words in str(found.value)
        assert f"fix: set '{nf4}'" in str(found.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "peft writes an adapter, and this run trained the whole model"),
        ((*MOE, "adapter=lora", "adapter.targets=[layers/mlp/up_XEM]"), "PEFT has no module for one expert"),
        (("adapter=lora", "export.directory=null"), "export.directory: is missing"),
    ],
)
def test_what_peft_cannot_hold_is_an_error(overrides, words, tmp_path):
    spec = spec_of("checkpoint.weights_from=runs/a", f"export.directory={tmp_path}/out", *overrides)
    with pytest.raises(ConfigError, match=words):
        check_peft(spec)
