"""The target of a line that names none: the accelerators of the machine, or simulated devices, and why."""

import pytest

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.compositions import forget_compositions
from meshloom.compiler.spec import attached


@pytest.fixture
def machine(monkeypatch):
    """Returns what makes this machine one with such devices and such compilers."""

    def of(kinds: tuple[str, ...], installed: tuple[str, ...], platforms: str = "") -> None:
        monkeypatch.setattr(attached, "attached_kinds", lambda: kinds)
        monkeypatch.setattr(attached, "is_installed", lambda platform: platform in installed)
        monkeypatch.setattr(attached, "_platforms", lambda: platforms)
        attached.automatic.cache_clear()
        forget_compositions()

    yield of
    attached.automatic.cache_clear()
    forget_compositions()


@pytest.mark.parametrize(("kinds", "installed", "platforms", "target", "why"), [
    ((), ("gpu", "tpu"), "", "cpu-8", "no accelerator is attached"),
    (("gpu",), ("gpu",), "", "local", "attached"),
    (("tpu",), ("tpu",), "tpu,cpu", "local", "attached"),
    (("gpu",), ("tpu",), "", "cpu-8", "a GPU is attached, and JAX's CUDA plugin is not installed: "
                                      "pip install 'meshloom[cuda]'"),
    (("gpu",), ("gpu",), "cpu", "cpu-8", "JAX_PLATFORMS is cpu"),
])  # fmt: skip
def test_the_target_is_what_jax_can_use(machine, kinds, installed, platforms, target, why):
    machine(kinds, installed, platforms)
    assert attached.automatic() == (target, why)
    assert read_spec(Request(()), then=lambda spec: spec.target.name) == target


def test_a_named_target_is_not_replaced(machine):
    machine(("gpu",), ("gpu",))
    assert read_spec(Request(("target=v5e-8",)), then=lambda spec: spec.target.name) == "v5e-8"
    assert read_spec(Request(("experiment=llama_128k_v5p",)), then=lambda spec: spec.target.name).startswith("v5p-")
