"""Holds the private parts of JAX that the runtime uses, read in JAX 0.10.2; no other file of the runtime uses one.

If a release drops a name:

    GceTpuCluster, GkeTpuCluster                 the variables and the metadata server that they read: JAX has no public
                                                   question "which cluster?"
    jax_distributed.global_state                 `jax.process_index`, and a key-value store of our own
    _jax.get_distributed_runtime_service,        `jax.distributed.initialize` as it is: no time limit for the first
      _jax.get_distributed_runtime_client          contact, and a process ends without a message when another is lost
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jax._src import distributed as jax_distributed
from jax._src.clusters import GceTpuCluster, GkeTpuCluster
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

TPU_CLUSTERS = {"gketpu": GkeTpuCluster, "gcetpu": GceTpuCluster}  # the second asks the network, on a TPU host alone
Starter = Callable[..., Any]


def joined() -> Any:
    """Returns JAX's state of this process: process_id, num_processes, coordinator_address, client."""
    return jax_distributed.global_state


@contextmanager
def started_by(service: Starter, client: Starter) -> Iterator[None]:
    """Within the `with`, `jax.distributed.initialize` starts its service and its client by these functions, whose first
    argument is JAX's own function."""
    start_service, make_client = _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_service = partial(service, start_service)
    _jax.get_distributed_runtime_client = partial(client, make_client)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client = start_service, make_client
