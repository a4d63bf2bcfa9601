"""`target=local` as its user sees it where the plugins of accelerators are installed, and there is none."""

import os
import re
import subprocess
import sys

import pytest
from jax._src import hardware_utils

from support.commands import meshloom, with_plugin

BROKEN = "def initialize():\n    raise RuntimeError('no driver of that name')\n"
# JAX takes it for one that has to start.
REFUSING = """def initialize():
    from jax._src import xla_bridge
    def refuse():
        raise ValueError("the driver is\\n too old")
    xla_bridge.register_backend_factory("refusing", refuse, priority=500, fail_quietly=False)
"""
SMALL = ("target=local", "model=linear_stack", "model.embed_dim=32", "model.num_layers=2", "sequence_length=16",
         "data=synthetic", "sharding=ddp")  # fmt: skip
LINE = re.compile(r"warning: JAX's CUDA plugin (and libtpu are|is) installed, but no GPU (or TPU )?was found: "
                  r"target=local is this machine's processor\n")  # fmt: skip

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        hardware_utils.has_visible_nvidia_gpu() or hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0,
        reason="there is an accelerator",
    ),
]


def test_a_plugin_without_a_chip_is_one_line_and_its_traceback_in_the_log(tmp_path):
    plugin = with_plugin(tmp_path, "xla_cuda13", BROKEN)
    line = (*SMALL, "experiment=smoke", "num_steps=1", "hydra.run.dir=run")
    done = meshloom("train", *line, cwd=tmp_path, **plugin)
    assert done.returncode == 0
    assert LINE.fullmatch(done.stderr), done.stderr
    log = (tmp_path / "run/logs/process-0.log").read_text()
    assert all(text in log for text in (done.stderr, "Traceback", "no driver of that name"))


def test_who_chooses_the_platform_is_told_nothing(tmp_path):
    plugin = with_plugin(tmp_path, "xla_cuda13", BROKEN)
    done = meshloom("explain", *SMALL, cwd=tmp_path, **plugin)
    assert LINE.fullmatch(done.stderr), done.stderr
    chosen = meshloom("explain", *SMALL, cwd=tmp_path, JAX_PLATFORMS="cpu", **plugin)
    assert LINE.search(chosen.stderr) is None
    assert chosen.stdout == done.stdout


def test_chips_that_are_not_there_are_one_error(tmp_path):
    plugin = with_plugin(tmp_path, "xla_cuda13", BROKEN)
    done = meshloom("train", *SMALL, "target=h100-8", "hydra.run.dir=run", cwd=tmp_path, **plugin)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: target: h100-8 is not attached to this machine"
    assert len(done.stderr.splitlines()) == 2


def test_what_a_plugin_says_beside_its_chip_stays_on_the_terminal(tmp_path):
    """In a process that takes this machine for one with a GPU."""
    plugin = with_plugin(tmp_path, "xla_cuda13", BROKEN)
    code = """if True:
        import sys
        from meshloom.compiler.spec import attached
        from meshloom.runtime.cli.main import run
        attached.attached_kinds = lambda: ("gpu",)
        sys.exit(run(sys.argv[1:]))
    """
    command = [sys.executable, "-c", code, "explain", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | plugin, check=False)
    assert done.returncode == 0
    assert "no driver of that name" in done.stderr
    warning = "warning: there is a GPU or TPU that JAX does not use, as it says above: target=local is this machine's"
    assert warning in done.stderr.splitlines()[-1]


def test_a_plugin_that_does_not_start_is_an_error(tmp_path):
    done = meshloom("explain", *SMALL, cwd=tmp_path, **with_plugin(tmp_path, "refusing", REFUSING))
    assert done.returncode == 2
    first, *others = done.stderr.splitlines()
    said = "Unable to initialize backend 'refusing': the driver is too old"
    assert first.startswith(f"error: target: JAX does not start: {said}")
    assert others == ["  fix: fix what it names, or choose simulated devices: target=cpu-8"]
