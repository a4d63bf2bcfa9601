"""Runs `meshloom export`: writes the weights of a run as others read them."""

import argparse
from functools import partial
from pathlib import Path

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.models.adapter import merged
from meshloom.models.contract import Params

from ..inference.open_weights import open_weights, start_session
from ..weights.export import prepare_export, run_export
from ..weights.write import check_peft, write_adapter


def export_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Writes the folder. Raises ConfigError for a mistake, before anything is written."""
    export = read_spec(
        request,
        then=lambda spec: (
            partial(export_peft, spec, check_peft(spec))
            if spec.export.format == "peft"
            else partial(run_export, prepare_export(spec, open_merged))
        ),
    )
    export(Console())
    return 0


def export_peft(spec: RunSpec, folder: Path, console: Console) -> None:
    """Writes the adapter of a run as a PEFT folder, with the place of its base by name."""
    session = start_session(spec)
    opened = open_weights(session, console)
    num_bytes = write_adapter(folder, session.plan, opened.params, opened.base)
    console.line(f"exported {session.plan.adapter} of step {opened.step}, {human_bytes(num_bytes)}: {folder}")


def open_merged(spec: RunSpec) -> Params:
    """Returns the parameters of a run that trained an adapter, merged with those of its base, on the devices."""
    session = start_session(spec)
    opened = open_weights(session, Console())

    def merge(params: Params) -> Params:
        return merged(session.plan.model, jax.tree.map(lambda x: x.astype("float32"), params))

    return jax.jit(merge)(opened.params)  # in float32, whatever type a frozen base is stored in: it is rounded once
