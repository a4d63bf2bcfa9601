"""Restores the state of the process around each call of the Python interface: the program belongs to someone else.

While Meshloom works, it changes Hydra's state, environment variables, the settings of JAX's compilation cache and the
level of a logger. One thing cannot be restored: JAX has started, with simulated devices if the target has them.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.hydra_private import hydra_state_put_back
from meshloom.compiler.declare.problems import OF_HYDRA, as_config_error
from meshloom.compiler.spec.target_spec import LocalTarget, TargetSpec
from meshloom.compiler.target.topology import CUDA_ENVIRONMENT, LIBTPU_ENVIRONMENT

from ..processes.devices import start_as_found, start_devices
from ..processes.distributed import Processes

CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextmanager
def library_call(modules: Sequence[str] = ()) -> Iterator[None]:
    """Within the `with`, declarations can be read, and code of these modules may run."""
    with hydra_state_put_back(), code_allowed_from(modules):
        try:
            yield
        except OF_HYDRA as error:
            raise as_config_error(error) from error


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Within the `with`, programs can be compiled and run; afterwards environment, JAX and loggers are as before."""
    with _environment_put_back(), _cache_put_back(), _orbax_is_silent():
        yield


def start_for_compile(target: TargetSpec) -> None:
    """Starts JAX as compiling for the target needs it. Raises ConfigError if it has started in another way."""
    if target.kind == "cpu" or isinstance(target, LocalTarget):
        start_devices(target, Processes(), warn)
    else:
        start_as_found()


def warn(text: str) -> None:
    """Issues a Python warning, which a program can filter."""
    warnings.warn(text.removeprefix("warning: "), stacklevel=2)


@contextmanager
def _environment_put_back() -> Iterator[None]:
    names = (*LIBTPU_ENVIRONMENT, *CUDA_ENVIRONMENT)
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _cache_put_back() -> Iterator[None]:
    """Within the `with`, JAX may use another compilation cache. JAX opens a cache once, so it is closed on both
    changes."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


@contextmanager
def _orbax_is_silent() -> Iterator[None]:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
