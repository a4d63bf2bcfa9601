"""What XLA's compiler for a target does, whatever its options: data, conf/overlap/_compiler_traits.yaml."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from meshloom.models.config import Record

from ..core.collectives import CollectiveKind


class CompilerTraits(Record):
    """Of the compiler for one target. The defaults are those of a compiler of which nothing is known.

    async_by_default: kinds of collectives of weights that run beside arithmetic without any option.
    synchronous_collectives: collectives are waited for whatever the options: a redundant one takes its time.
    unordered_collectives: devices may run collectives that do not need each other in different orders, and deadlock.
    all_reduces_each_matmul: partial results of each matmul are all-reduced by themselves; else those of several are
        joined, in shards.
    async_permutes: permutes run beside what does not need them; not on more chips than max_chips_async_permutes.
    copies_loop_carry: what a loop carries to its next iteration is copied.
    gathers_before_loops: a gather that stands before a loop ends before it.
    aborts_on_unroll: the process aborts at several layers in an iteration where a mesh axis splits matmuls.
    max_reduce_scatter: the most devices, times the odd factor of a dimension that is not scattered, of which a
        reduce-scatter stays one; of more it becomes an all-reduce. None: any.
    """

    async_by_default: tuple[CollectiveKind, ...] = ()
    synchronous_collectives: bool = False
    unordered_collectives: bool = False
    all_reduces_each_matmul: bool = False
    async_permutes: bool = False
    max_chips_async_permutes: int | None = None
    copies_loop_carry: bool = False
    gathers_before_loops: bool = False
    aborts_on_unroll: bool = False
    max_reduce_scatter: int | None = None

    def max_odd_factor(self, num_devices: int) -> int | None:
        """The largest odd factor of a dimension of which so many devices reduce-scatter another; None: any, or none."""
        return self.max_reduce_scatter // num_devices or None if self.max_reduce_scatter else None


def read_compiler_traits(platform: str, chip: str | None) -> CompilerTraits:
    """The traits of the compiler for a chip of a platform; None: for any device of it."""
    table = traits_by_name()
    found = [table[name] for name in (platform, chip) if name in table]
    return CompilerTraits.model_validate_json(json.dumps({key: value for one in found for key, value in one.items()}))


@cache
def traits_by_name() -> dict[str, dict[str, Any]]:
    """The file: by platform and by chip, what is known of its compiler."""
    text = files("meshloom.conf").joinpath("overlap", "_compiler_traits.yaml").read_text()
    return yaml.safe_load(text)
