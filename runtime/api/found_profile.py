"""Finds a profile of any program, and what ran in it, in the files that profilers write.

HOST.xplane.pb                   of `jax.profiler`, one for each host of a session, below plugins/profile/TIME
HOST.trace.json.gz               the same, without programs
hlo_stats.csv, hlo_stats.json    XProf's table of operations
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.core.format import counted, human_names, human_share
from meshloom.compiler.profile.op_table import OpRow, TableError, is_op_table, read_op_table, seconds_by_program
from meshloom.compiler.profile.planes import (
    Plane,
    PlanesError,
    ProfiledProgram,
    is_xspace,
    programs_in,
    read_json_planes,
    read_planes,
)
from meshloom.compiler.profile.trace import base_name, device_kinds, measured_programs
from meshloom.compiler.xla.hlo import HloError
from meshloom.compiler.xla.protos import proto_text

from ..core.inputs import bytes_of_file, plain_name

XPLANE, TRACE = ".xplane.pb", ".trace.json"
MOST_HOSTS = 8  # of a session whose traces are read; hosts run the same program
LEAST_SHARE = 0.9  # of the measured time that one program needs, to be the one that is meant
CLEAR_SHARE = 0.99  # of it, with which the others are not worth a word
COPY = "copy it again, or trace once more"
GIVE_TEXT = "give the text of its program after it, as compiled.as_text() or a dump has it"


@dataclass(frozen=True)
class FoundProfile:
    """A profile. hosts: the planes of each host; empty for a table. rows: of a table. programs: the programs that are
    in it. note: the choice that was made among several sessions or hosts; empty if there was none."""

    path: Path
    hosts: tuple[Sequence[Plane], ...]
    rows: tuple[OpRow, ...]
    programs: tuple[ProfiledProgram, ...]
    note: str = ""

    def device_kinds(self) -> list[str]:
        """Returns the kinds of the devices, where the profiler names them."""
        return list(dict.fromkeys(kind for planes in self.hosts for kind in device_kinds(planes)))

    def measured(self) -> Mapping[str, float]:
        """Returns the seconds that each program ran, the longest first."""
        if self.rows:
            return seconds_by_program(self.rows)
        sums: dict[str, float] = {}
        for planes in self.hosts:
            for name, seconds in measured_programs(planes).items():
                sums[name] = sums.get(name, 0.0) + seconds
        return dict(sorted(sums.items(), key=lambda each: -each[1]))


def find_profile(path: Path) -> FoundProfile | None:
    """Returns the profile at a path; None if what is there is something else. Raises ConfigError for a profile that
    cannot be read."""
    if path.is_dir():
        return _in_directory(path)
    name = plain_name(path.name)
    if path.is_file() and name.endswith(XPLANE):
        return _of_hosts(path, [path], "")
    if path.is_file() and name.endswith((".json", ".csv")):
        return _of_text(path)
    is_other = path.is_file() and name.endswith(".pb") and is_xspace(bytes_of_file(str(path), str(path), COPY))
    return _of_hosts(path, [path], "") if is_other else None


def _in_directory(path: Path) -> FoundProfile | None:
    """Returns the newest session below a directory."""
    files = [each for ending in (XPLANE, f"{XPLANE}.gz") for each in path.rglob(f"*{ending}")]
    if not files:
        traces = sorted(each for ending in (TRACE, f"{TRACE}.gz") for each in path.rglob(f"*{ending}"))
        return _of_text(traces[-1]) if traces else None
    sessions = sorted({each.parent for each in files}, key=lambda place: (place.name, str(place)))
    hosts = sorted(each for each in files if each.parent == sessions[-1])
    notes = [f"{sessions[-1].name} is the newest of {len(sessions)} sessions"] if len(sessions) > 1 else []
    if len(hosts) > MOST_HOSTS:
        notes.append(f"the traces of {MOST_HOSTS} of {len(hosts)} hosts are read")
    return _of_hosts(sessions[-1], hosts[:MOST_HOSTS], "; ".join(notes))


def _of_hosts(path: Path, files: Sequence[Path], note: str) -> FoundProfile:
    hosts: list[Sequence[Plane]] = []
    programs: dict[str, ProfiledProgram] = {}
    for file in files:
        content = bytes_of_file(str(file), str(file), COPY)
        if not content:
            raise ConfigError([Problem(str(file), "is empty", COPY)])
        try:
            hosts.append(read_planes(content))
            for each in programs_in(content):
                programs.setdefault(each.name, each)
        except PlanesError as error:
            what = f"is not a whole profile: it is cut off, or damaged ({error})"
            raise ConfigError([Problem(str(file), what, COPY)]) from None
    return FoundProfile(path, tuple(hosts), (), tuple(programs.values()), note)


def _of_text(path: Path) -> FoundProfile | None:
    """Returns the profile in JSON or CSV; None for a text that is neither a trace nor a table."""
    text = bytes_of_file(str(path), str(path), COPY).decode("utf-8", "replace")
    is_trace = plain_name(path.name).endswith(TRACE) or '"traceEvents"' in text[:100_000]
    try:
        if is_op_table(text) and not is_trace:
            return FoundProfile(path, (), read_op_table(text), ())
        if is_trace:
            return FoundProfile(path, (read_json_planes(text),), (), ())
    except (PlanesError, TableError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read as a profile: {error}", COPY)]) from None
    if plain_name(path.name).endswith(".csv"):
        what = "is not a table of operations: it has no column hlo_op_name"
        raise ConfigError([Problem(str(path), what, "export the tool HLO Op Stats of XProf as CSV")])
    return None


def choose_measured(profile: FoundProfile, named: str | None) -> tuple[str, str]:
    """Returns the program whose executions are judged, by its name in the profile, and a note on the choice. It is the
    one of that name, or the one that takes nearly all of the time. Raises ConfigError if none is."""
    measured = profile.measured()
    if not measured:
        what = "has no operation of a program of XLA that ran on a device"
        fix = "trace whole steps by jax.profiler or torch_xla: other profilers do not name a program's operations"
        raise ConfigError([Problem(str(profile.path), what, fix)])
    found = {name: seconds for name, seconds in measured.items() if named in (None, name, base_name(name))}
    if not found:
        fix = use_one_of(named or "", dict.fromkeys(measured))
        raise ConfigError([Problem("--module", f"{profile.path} has no run of a program {named}", fix)])
    whole = sum(found.values())
    first = next(iter(found))
    if found[first] < LEAST_SHARE * whole:
        shares = [f"{name} ({human_share(seconds / whole)})" for name, seconds in found.items()]
        what = f"{counted(len(found), 'program')} took its time: {human_names(shares, 5)}"
        raise ConfigError([Problem(str(profile.path), what, f"choose one: --module '{first}'")])
    if found[first] > CLEAR_SHARE * whole:
        return first, ""
    share = human_share(found[first] / whole)
    return first, f"{first} took {share} of the time of {counted(len(found), 'program')}; --module NAME chooses"


def text_of_program(profile: FoundProfile, name: str) -> str:
    """Returns the text of a program in a profile. Raises ConfigError if it is not there."""
    found = [each for each in profile.programs if each.name == name]
    found = found or [each for each in profile.programs if base_name(each.name) == base_name(name)]
    if not found:
        there = human_names([each.name for each in profile.programs], 3) if profile.programs else "no program at all"
        host = profile.path.name.partition(TRACE)[0]
        beside = [each.name for each in sorted(profile.path.parent.glob(f"{escape(host)}{XPLANE}*"))
                  if each != profile.path]  # fmt: skip
        fix = f"name {beside[0]} beside it, which has its programs, or {GIVE_TEXT}" if beside else GIVE_TEXT
        raise ConfigError([Problem(str(profile.path), f"has no HLO of {name}: it has {there}", fix)])
    try:
        return proto_text(max(found, key=lambda each: len(each.proto)).proto)
    except HloError as error:
        raise ConfigError([Problem(str(profile.path), f"the HLO of {name}: {error}", GIVE_TEXT)]) from None
