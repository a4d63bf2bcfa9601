"""Runs `meshloom export`: writes the weights of a run as others read them."""

import argparse
from functools import partial

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.models.adapter import merged
from meshloom.models.contract import Params

from ..inference.open_weights import open_weights, start_session
from ..weights.export import prepare_export, run_export


def export_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Writes the folder. Raises ConfigError for a mistake, before anything is written."""
    run_export(read_spec(request, then=partial(prepare_export, open_merged=open_merged)), Console())
    return 0


def open_merged(spec: RunSpec) -> Params:
    """Returns the parameters of a run that trained an adapter, merged with those of its base, on the devices."""
    session = start_session(spec)
    opened = open_weights(session, Console())

    def merge(params: Params) -> Params:
        return merged(session.plan.model, jax.tree.map(lambda x: x.astype("float32"), params))

    return jax.jit(merge)(opened.params)  # in float32, whatever type a frozen base is stored in: it is rounded once
