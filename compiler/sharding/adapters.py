"""The matrices that a declaration adapts: patterns of paths to a model with adapters (models/adapter.py)."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from meshloom.models import Model
from meshloom.models.adapter import Matrix, adapt, find_matrices
from meshloom.models.adapter_config import AdapterConfig

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.trees import leaves_by_path

WHERE = "adapter.targets"
_LENGTH = 8  # of the sequence that the model is traced with, in tokens


def adapted_model(model: Model, adapter: AdapterConfig) -> Model:
    """Returns the model with adapters beside the matrices that the declaration names. Raises ConfigError for a pattern
    that names none, and for dropout of the input of experts."""
    matrices = find_matrices(model, length=min(_LENGTH, model.max_length or _LENGTH))
    targets = _by_default(model, matrices) if adapter.targets is None else _named(model, matrices, adapter.targets)
    experts = [path for path, matrix in targets.items() if matrix.is_of_experts]
    if experts and adapter.dropout:
        what = f"the input of '{experts[0]}' cannot be dropped: experts multiply with it and its adapter at once"
        raise_if_any([Problem("adapter.dropout", what, f"set adapter.dropout=0, or leave experts out of {WHERE}")])
    return adapt(model, adapter, targets)


def _by_default(model: Model, matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Returns the matrices of layers, but routers and experts."""
    stacks = {stack.name for stack in model.stacks}
    chosen = {
        path: matrix
        for path, matrix in matrices.items()
        if path.split("/")[0] in stacks and path not in model.float32 and not matrix.is_of_experts
    }
    if not chosen:
        fix = "let the model multiply by context.matmul (docs/extend.md)"
        fix = f"name matrices of other pieces: {use_one_of('', matrices)}" if matrices else fix
        raise_if_any([Problem(WHERE, "no matmul of a layer reads a parameter", fix)])
    return chosen


def _named(model: Model, matrices: Mapping[str, Matrix], patterns: tuple[str, ...]) -> dict[str, Matrix]:
    """Returns the matrices that patterns name; a pattern passes over what no matmul reads, as norms beside them."""
    raise_if_any(_wrong(model, matrices, patterns))
    return {path: each for path, each in matrices.items() if any(fnmatchcase(path, pattern) for pattern in patterns)}


def _wrong(model: Model, matrices: Mapping[str, Matrix], patterns: tuple[str, ...]) -> Iterator[Problem]:
    paths = tuple(leaves_by_path(model.abstract()))
    tied = {f"embed/{name}" for name in model.tied.values()}
    for index, pattern in enumerate(patterns):
        matching = [path for path in paths if fnmatchcase(path, pattern)]
        if any(path in matrices for path in matching):
            continue
        what = f"no parameter matches '{pattern}'"
        if matching:
            others = f" (and {len(matching) - 1} more)" if len(matching) > 1 else ""
            why = "the embedding and the head share it" if matching[0] in tied else "no matmul reads it"
            what = f"'{pattern}' matches '{matching[0]}'{others}, which cannot be adapted: {why}"
        yield Problem(f"{WHERE}[{index}]", what, use_one_of(pattern, matrices))
