"""A key that had another name in an earlier version is answered with the new one."""

import pytest

from meshloom.compiler.config.compose import Request, read_spec
from meshloom.compiler.config.renamed_keys import RENAMED
from meshloom.compiler.core.errors import ConfigError

SAID = {
    "notes={ticket: 7}": "run.extra={ticket:7}",
    "logging.tensorboard=true": "logging.trackers=[tensorboard]",
    "logging.tensorboard=false": "logging.trackers=[]",
    "sharding.look_up=gather": "parallel.embedding=all_gather",
    "sharding.look_up=exchange": "parallel.embedding=all_to_all",
    "overlap.rings=[mlp_output]": "parallel.matmul={mlp_output:collective_matmul}",
    "overlap.rings=[]": "parallel.matmul=plain",
    "overlap.head=parts": "parallel.lm_head=vocab_chunks",
    "kernels.attention=xla": "parallel.attention=xla",
    "overlap.option_sets=[synchronous]": "overlap.flag_presets=[synchronous]",
    "overlap.layers.batch_parts=2": "overlap.layers.batch_split=2",
}


@pytest.mark.parametrize("old", SAID)
def test_an_old_key_is_told_the_override_of_today_which_works(old):
    with pytest.raises(ConfigError) as error:
        read_spec(Request((old,)), then=lambda spec: spec)
    (problem,) = error.value.problems
    assert problem.fix == f"use {SAID[old]}"
    assert read_spec(Request((SAID[old],)), then=lambda spec: spec)


def test_every_renamed_key_is_tried_and_gone():
    assert {old.partition("=")[0] for old in SAID} == set(RENAMED)
