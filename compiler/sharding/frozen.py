"""Which parameters are trained, and which are frozen: by patterns over their paths, such as `embed/*`."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ..core.errors import Problem, raise_if_any, use_one_of
from ..spec.spec import RunSpec


def frozen_paths(spec: RunSpec, paths: Iterable[str], *, ruled: Collection[str] = ()) -> frozenset[str]:
    """Returns the paths of the parameters that `frozen_parameters` names. ruled: those that rules update.

    Raises ConfigError for a pattern that matches no parameter, where no parameter is left to train, and for
    `precision.frozen` without frozen parameters."""
    paths = tuple(paths)
    frozen = frozenset(path for path in paths if any(fnmatchcase(path, each) for each in spec.frozen_parameters))
    problems = [
        Problem(f"frozen_parameters[{index}]", f"no parameter matches '{pattern}'", use_one_of(pattern, paths))
        for index, pattern in enumerate(spec.frozen_parameters)
        if not any(fnmatchcase(path, pattern) for path in paths)
    ]
    if frozen.union(ruled).issuperset(paths):
        fix = "leave out a pattern, so that something is trained"
        problems.append(Problem("frozen_parameters", f"all {len(frozen)} parameters of the model are frozen", fix))
    if spec.precision.frozen is not None and not spec.frozen_parameters:
        fix = "set precision.frozen=null, or name parameters: frozen_parameters=[embed/*]"
        problems.append(Problem("precision.frozen", "no parameter is frozen", fix))
    raise_if_any(problems)
    return frozen
