"""Measures how long reading and simulating a scheduled program of many MB takes: `python bench/schedule.py [MB]`.

The text is a recorded one (tests/schedules) with its layers' loops repeated under new names, run one after the other.
"""

import lzma
import re
import sys
import time
from pathlib import Path

from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import Priced, simulate

CHIP = Chip("tpu", 1.75e9, {"bfloat16": 918e12}, 1638e9)
RECORDED = Path(__file__).parent.parent / "tests/schedules/v6e_sparsecore.txt.xz"


def repeated(text: str, num_bytes: int) -> str:
    """Copies of all computations under names of their own, each copy of the entry run by the next."""
    head, body = re.split(r"\n(?=%)", text, maxsplit=1)
    head = head.split("\n", 1)[0]
    copies, entry = [], body
    for number in range(max(1, num_bytes // len(body))):
        copy = re.sub(r"%([\w.\-]+)", rf"%\1.copy{number}", entry)
        name = re.search(r"^ENTRY %([\w.\-]+)", copy, re.M)
        assert name
        copies.append((name[1], copy.replace("ENTRY ", "")))
    calls = [f"  %run.{number} = () call(), to_apply=%{name}" for number, (name, _) in enumerate(copies)]
    main = "\n".join(["ENTRY %everything () -> () {", *calls, "  ROOT %nothing = () tuple()", "}", ""])
    return "\n\n".join([head, *(copy for _, copy in copies), main])


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 5
    text = repeated(lzma.decompress(RECORDED.read_bytes()).decode(), int(megabytes * 1e6))
    start = time.perf_counter()
    module = parse_module(text)
    parsed = time.perf_counter()
    steps = read_steps(module, CHIP, OPERATIONS)
    read = time.perf_counter()
    result = simulate(steps, lambda collective: Priced(collective.num_bytes / 1e11, ("ICI",)))
    done = time.perf_counter()
    print(f"{len(text) / 1e6:.1f} MB, {len(result.collectives)} collectives: parsed in {parsed - start:.2f} s, "
          f"read as steps in {read - parsed:.2f} s, simulated in {done - read:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
