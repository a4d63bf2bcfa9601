"""The programs of a run: what their compiler prints goes to its log, and what matters of it is said."""

import os

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.xla.programs import Programs, build
from meshloom.runtime.compile import run_programs
from meshloom.runtime.compile.run_programs import make_programs
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest

# As jax 0.12 prints it; 0.10.2 prints none.
WHOLE = (
    "W0000 00:00:1 1 spmd_partitioner.cc:669] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
    "sharding {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]} efficiently for HLO operation %dot.3 = f32[8,16]{1,0} "
    'dot(%a, %b), metadata={op_name="jit(train_step)/head/dot_general"}'
)


def test_what_the_compiler_prints_is_in_its_log_and_a_whole_gather_is_a_warning(tmp_path, capfd, monkeypatch):
    def build_aloud(lowered: Programs) -> Programs:
        os.write(2, f"{WHOLE}\nsomething else\n".encode())
        return build(lowered)

    monkeypatch.setattr(run_programs, "build", build_aloud)
    (tmp_path / "logs").mkdir()
    plan = plan_of(*LINEAR_STACK, "target=cpu-2", "model.num_layers=1", "compilation_cache=null")
    processes = Processes()
    with StopRequest(processes) as stop:
        make_programs(plan, None, tmp_path, stop=stop, console=Console(), processes=processes)
    out, err = capfd.readouterr()
    assert err == ""
    assert (tmp_path / "logs" / "compiler.log").read_text() == f"{WHOLE}\nsomething else\n"
    assert out.count("warning: ") == 1
    assert "warning: jit(train_step)/head/dot_general (dot.3): an array of f32[8,16] is gathered whole" in out
    assert f"(see {tmp_path}/logs/compiler.log)" in out
    assert "something else" not in out
