"""How the global batch is cut: into microbatches, and those over devices."""

import pytest

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.sharding.batch import check_batch


def test_microbatches_and_data_shards_divide_the_global_batch():
    plan = plan_of(*LINEAR_STACK, "target=cpu-8")
    check_batch(spec_of(*LINEAR_STACK, "global_batch_size=16", "num_microbatches=2"), plan.mesh, plan.roles)
    for wrong in (["global_batch_size=16", "num_microbatches=3"], ["global_batch_size=12"]):
        with pytest.raises(ConfigError, match="not divisible by 8 data shards"):
            check_batch(spec_of(*LINEAR_STACK, *wrong), plan.mesh, plan.roles)
