"""Imports a module when it is used. The kernels of Pallas take 0.3 s to import, and most steps for CPUs use none."""

from importlib import import_module
from types import ModuleType
from typing import Any


class Deferred(ModuleType):
    """A module of this name, which is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)
