"""Writes and reads PGLE files: the times by which XLA's GPU compiler schedules (profile-guided latency estimation).

    # fingerprint_before_lhs: 9ad3c0ffee
    costs { name: "custom-call.15" cost_us: 470.217 }
    costs { name: "all-gather-start.3" cost_us: 729 }

The instructions have the names of the program before it is scheduled, and a collective that of its start. XLA does not
see that a file belongs to another program: it ignores names that it does not find. So a file says by which program its
names are; the compiler writes that program's fingerprint into the text of the scheduled one.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import ConfigError, Problem, raise_if_any
from ..spec.overlap_spec import PRICES
from ..spec.plan_spec import PlanSpec
from ..target.target import TargetPlan

KEY = "overlap.pgle"
OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
SUFFIX = ".pbtxt"  # by which XLA sees that a file is text
MARK = "fingerprint_before_lhs"

_OF_PROGRAM = re.compile(rf'{MARK}="([^"]+)"')
_OF_FILE = re.compile(rf"^\s*#\s*{MARK}:\s*(\S+)\s*$", re.M)


def check_pgle_key(spec: PlanSpec, target: TargetPlan) -> None:
    """Raises ConfigError if the target's compiler takes no PGLE file, or the declared one cannot be read."""
    declared, problems = spec.overlap.pgle, list[Problem]()
    if declared is None:
        return
    if target.platform != "gpu":
        what = f"only XLA's compiler for GPUs schedules by a PGLE file, and {target.name} is of platform"
        problems.append(Problem(KEY, f"{what} {target.platform}", f"set {KEY}=null"))
    elif declared == PRICES and target.chip is None:
        what = f"the prices of {target.name} are not known"
        problems.append(Problem(KEY, what, "set target to the GPUs that you will train on, such as h100-8"))
    elif declared != PRICES and not Path(declared).is_file():
        fix = f"give the path of a PGLE file, or set {KEY}={PRICES}"
        problems.append(Problem(KEY, f"there is no file {declared}", fix))
    elif declared != PRICES and "cost_us" not in Path(declared).read_text(errors="replace"):
        what = f"{declared} is no PGLE file: it has no line `costs {{ name: ... cost_us: ... }}`"
        problems.append(Problem(KEY, what, f"give the path of a PGLE file, or set {KEY}={PRICES}"))
    if OPTION in spec.compiler_options:
        problems.append(Problem(f"compiler_options.{OPTION}", f"is set, and so is {KEY}", "leave one of them out"))
    raise_if_any(problems)


def program_fingerprint(text: str) -> str | None:
    """Returns XLA's fingerprint of a program before it was scheduled, from the scheduled text; None if it has none."""
    found = _OF_PROGRAM.search(text)
    return found[1] if found else None


def pgle_text(fingerprint: str, seconds: Mapping[str, float]) -> str:
    """Returns a PGLE file for the program of a fingerprint. seconds: of one execution, by the instruction's name."""
    costs = (f'costs {{ name: "{name}" cost_us: {once * 1e6:.6g} }}' for name, once in seconds.items())
    return "\n".join([f"# {MARK}: {fingerprint}", *costs, ""])


def check_pgle(profile: str, program: str, path: str) -> None:
    """Raises ConfigError if a PGLE file is of another program. program: the scheduled text. path: of the file."""
    of_file, wanted = _OF_FILE.search(profile), program_fingerprint(program)
    if of_file is not None and of_file[1] == wanted:
        return
    if of_file is None:
        what = f"{path} does not say by which program its names are: it has no line `# {MARK}: ...`"
        fix = f"add that line if it is {wanted}, which this program has; or set {KEY}=prices"
    else:
        what = f"{path} is of another program: its {MARK} is {of_file[1]}, and this program's is {wanted}"
        fix = f"give the file of this program, or set {KEY}=prices"
    raise ConfigError([Problem(KEY, what, fix)])
