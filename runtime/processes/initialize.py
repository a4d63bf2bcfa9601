"""`jax.distributed.initialize`, with what it does not ask of its own parts: who did not come, and whether the port is
free."""

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import jax

from meshloom.compiler.config.spec import DistributedSpec
from meshloom.compiler.core.errors import Problem

from ..core.failures import LOST, RunFailed
from .jax_private import Starter, joined, started_by
from .lost import Group, Lookout

SECONDS_FOR_ANSWER = 5  # in which the service names those that did not come, before clients give up by themselves


def initialize(arguments: Mapping[str, Any], timeouts: DistributedSpec, lookout: Lookout) -> None:
    """Joins the other processes, with a lookout for what JAX would end this one by. arguments: of the start.

    Raises RunFailed where process 0 cannot listen at its port, and whatever JAX raises.
    """
    with _own_parts(timeouts, lookout):
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=timeouts.initialization_timeout_seconds + SECONDS_FOR_ANSWER,
            heartbeat_timeout_seconds=timeouts.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=timeouts.shutdown_timeout_seconds,
        )


def _own_parts(timeouts: DistributedSpec, lookout: Lookout) -> AbstractContextManager[None]:
    """Within the `with`, `initialize` starts the service and the client with more arguments than it gives them."""

    def service(start_service: Starter, address: str, count: int, **options: Any) -> Any:
        check_port_is_free(address)
        seconds = timeouts.initialization_timeout_seconds
        return start_service(address, count, cluster_register_timeout=seconds, **options)

    def client(make_client: Starter, address: str, index: int, **options: Any) -> Any:
        lookout.start(Group(index, joined().num_processes, address, timeouts))
        return make_client(address, index, **options)

    return started_by(service, client)


def check_port_is_free(address: str) -> None:
    """Raises RunFailed where process 0 cannot listen at an address, "[::]:8476": there JAX ends by a fault of memory.

    The next start may find the port free: its owner may be the last start of this run, which has not ended yet.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that has ended is no owner
            if ":" in host:
                with suppress(OSError):
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, int(port)))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # JAX may have a way: a machine without IPv6
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened: {os.strerror(error.errno)}"
        what = f"port {port} of {socket.gethostname()} {reason}, and process 0 waits there for the others"
        fix = (
            f"`ss -ltnp sport = :{port}` shows who has it; end that, or give all processes another port "
            "(distributed.coordinator_address, or JAX_COORDINATOR_PORT)"
        )
        raise RunFailed(Problem("distributed", what, fix), LOST) from error
