"""Ten thousand candidates priced by `meshloom tune`, beside a plain loop over `explain`.

    pip install -e . && python bench/tune_speed.py [--wide] [--loop 12]

llama3_8b on v5p-3072, with the groups that are searched by default, in as many processes as there are cores; then
--loop of its candidates, one after the other, composed, planned and estimated as `explain` does. With --wide there are
fewer meshes (v5p-1024) and more to trace: three shardings, five remat policies and two precisions.
"""

import argparse
import statistics
import time

import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.tune.families import choose_points, find_families, group_candidates
from meshloom.compiler.tune.price import price_candidates
from meshloom.compiler.tune.space import find_candidates
from meshloom.runtime.processes.devices import plan_without_devices
from meshloom.runtime.tune.variants import find_space
from meshloom.runtime.tune.workers import workers

SPACE = ("model=llama3_8b", "target=v5p-3072", "global_batch_size=4608", "sequence_length=8192", "data=synthetic")
WIDE = (
    "model=llama3_8b", "target=v5p-1024", "global_batch_size=4096", "sequence_length=8192", "data=synthetic",
    "tune.groups={sharding: [fsdp_tensor, zero1, zero2], remat: [none, save_dots, save_names, offload, full], "
    "precision: [bfloat16, bfloat16_params]}",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", type=int, default=12, help="candidates of the plain loop")
    parser.add_argument("--wide", action="store_true", help="the space of many options")
    arguments = parser.parse_args()
    start = time.perf_counter()
    space = find_space(Request(WIDE if arguments.wide else SPACE))
    plan_without_devices(space.spec.target)
    marks = {"compose": time.perf_counter()}
    candidates, refused = find_candidates(space.variants)
    groups = group_candidates(candidates)
    marks["rules"] = time.perf_counter()
    with workers(space.spec.target, Console(is_quiet=True)) as runner:
        families = find_families(groups, runner.trace)
    marks["traces"] = time.perf_counter()
    price_candidates(candidates, families)
    marks["prices"] = time.perf_counter()
    number, num_traces = len(candidates) + refused.total, sum(len(choose_points(ones)) for ones in groups.values())
    taken = f"{marks['prices'] - start:.1f} s"
    print(f"{number:,} candidates, {len(candidates):,} of them priced, from {num_traces} traces: {taken}")
    before = start
    for name, at in marks.items():
        print(f"  {name}: {at - before:.1f} s")
        before = at
    seconds = []
    for place in np.random.default_rng(0).choice(len(candidates), arguments.loop, replace=False):
        begun = time.perf_counter()
        request = Request((*space.request.overrides, *candidates[place].overrides))
        estimate_step(read_spec(request, then=plan_run))
        seconds.append(time.perf_counter() - begun)
    each = statistics.median(seconds)
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    print(f"a plain loop: {each:.2f} s for each ({spread}), {each * len(candidates) / 60:.0f} minutes for those priced")


if __name__ == "__main__":
    main()
