"""Eight simulated devices, and small declarations to test on."""

import argparse
import gc
import os
import signal
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

# The suite compiles hundreds of programs and runs each for milliseconds, so machine code need not be fast. XLA's own
# passes, which decide what crosses the network, are not touched by this. Without the fusion emitters, which go through
# MLIR, a small train step compiles in a third of the processor time; later releases of jaxlib know no other way. In one
# module of LLVM, instead of 32 that are compiled by as many threads, it takes three quarters of what is left.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    f"{' --xla_cpu_use_fusion_emitters=false' if version('jaxlib').startswith('0.10.') else ''}"
)

os.environ.setdefault("PJRT_NPROC", "16")  # threads for 8 devices (runtime/processes/devices.py)

# Where libtpu is installed, it compiles for TPUs that are not there, in several processes at once, and says nothing.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
               "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip

# Commands that tests run keep their compiled programs here, all of them, and not in the user's home; and the user's
# calibrations are not found.
if "MESHLOOM_TEST_CACHE" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="meshloom-cache-")  # removed when this process ends; workers share it
    os.environ["MESHLOOM_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = CACHE.name
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

# A shell starts what runs in its background with Ctrl-C ignored, which every process started from there would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import numpy as np
import pytest

# The clock decides no test.
hypothesis.settings.register_profile("meshloom", deadline=None)
hypothesis.settings.load_profile("meshloom")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# A traced program is hundreds of thousands of objects that stay. To look through them at every 700 new ones takes a
# tenth to a quarter of the time of the tests.
gc.set_threshold(50_000, 20, 100)

from meshloom.compiler.core.user_code import code_allowed_from  # noqa: E402
from meshloom.compiler.declare.compose import Request, read_spec  # noqa: E402
from meshloom.compiler.declare.run_spec import RunSpec  # noqa: E402
from meshloom.compiler.driver import plan_run  # noqa: E402
from meshloom.compiler.plan import Plan  # noqa: E402
from support.tiers import TIERS, tier_of  # noqa: E402

pytest_plugins = ("support.times", "support.proofs")


def _tiers(text: str) -> tuple[str, ...]:
    names = TIERS if text == "all" else tuple(text.split(","))
    if not set(names) <= set(TIERS):
        raise argparse.ArgumentTypeError(f"'{text}' is not all or some of {', '.join(TIERS)}, separated by commas")
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", type=_tiers, default=TIERS[:1], metavar="TIER[,TIER]",
        help="run the tests of these tiers alone, or all (docs/testing.md); a test named as FILE::NAME always runs",
    )  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that cannot have a chosen test: importing the libraries of peers takes ten seconds."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("markexpr") == "peers":
        return True if "mark.peers" not in collection_path.read_text() else None
    is_chosen = config.getoption("tier") == TIERS or config.args_source is pytest.Config.ArgsSource.ARGS
    return True if collection_path.stem.endswith("_peers") and not is_chosen else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of other tiers, unless tests are chosen by name or by `-m`."""
    tiers = config.getoption("tier") or TIERS
    if tiers == TIERS or config.getoption("markexpr") or any("::" in argument for argument in config.args):
        return
    config.hook.pytest_deselected(items=[item for item in items if tier_of(item) not in tiers])
    items[:] = [item for item in items if tier_of(item) in tiers]


# Wide enough for eight tensor shards, small enough to compile in a second or two.
SMALL = (
    "model.embed_dim=32", "model.num_layers=3", "model.num_heads=16", "model.num_kv_heads=8", "model.head_dim=4",
    "model.mlp_dim=64", "model.initializer_stddev=0.2", "sequence_length=16", "global_batch_size=16", "num_steps=10",
    "schedule.num_warmup_steps=2", "data=synthetic", "precision=float32",
)  # fmt: skip

# The same with one matmul per layer: it has no attention.
LINEAR_STACK = ("model=linear_stack", "~model.num_heads", "~model.num_kv_heads", "~model.head_dim", "~model.mlp_dim",
                "~model.initializer_stddev")  # fmt: skip

# A model of tests (support/pointwise.py), in which no token sees another.
POINTWISE = (
    *LINEAR_STACK,
    "model.family=support.pointwise:PointwiseConfig",
    "+model.mlp_dim=64",
    "+model.penalty=0.05",
)

# Tensor parallelism with the residual stream whole on every device of `tensor`.
WHOLE_STREAM = (
    "sharding=fsdp_tensor",
    "sharding.activations=[{logical: [batch], mesh: [replica, data, fsdp]}, "
    "{logical: [vocab, mlp, heads, kv_heads], mesh: [tensor]}, "
    "{logical: [length, sequence_parallel_length, embed, head_dim], mesh: []}]",
)


@cache
def spec_of(*overrides: str) -> RunSpec:
    """The spec of a small run with these overrides."""
    return read_spec(Request((*SMALL, *overrides)), then=lambda spec: spec)


@cache
def plan_of(*overrides: str) -> Plan[RunSpec]:
    """The plan of a small run with these overrides."""
    return plan_run(spec_of(*overrides))


def pointwise_plan(*overrides: str) -> Plan[RunSpec]:
    """The plan of a small run of the pointwise model."""
    with code_allowed_from(["support.pointwise"]):
        return plan_of(*POINTWISE, *overrides)


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    """Ten global batches of random tokens: (10, 16, 17)."""
    return np.random.default_rng(0).integers(0, 257, (10, 16, 17), dtype=np.int32)
