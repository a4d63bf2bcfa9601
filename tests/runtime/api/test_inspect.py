"""`meshloom.inspect` of programs that JAX compiled here."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshloom
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import find_devices


@pytest.fixture(scope="module")
def compiled():
    """A step of one matrix, whose gradient is summed over the batch."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("batch", "width"))

    def step(weights, x):
        return weights - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights)

    def on(*shape: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    arguments = on(64, 32, spec=PartitionSpec(None, "width")), on(16, 64, spec=PartitionSpec("batch"))
    return jax.jit(step, donate_argnums=0).lower(*arguments).compile()


def test_a_compiled_program_is_reported_with_its_own_axes_and_lines(compiled):
    found = meshloom.inspect(compiled, target="cpu-8")
    gradient = next(each for each in found.report.collectives if each.bytes > 100)
    assert (gradient.kind, gradient.mesh_axes, gradient.bytes) == ("all-reduce", ("batch",), 64 * 16 * 4)
    assert gradient.line.startswith("api/test_inspect.py:")
    assert (
        found.report.compiled.peak_bytes
        == compiled.memory_analysis().argument_size_in_bytes
        + (compiled.memory_analysis().temp_size_in_bytes)
        + compiled.memory_analysis().output_size_in_bytes
        - compiled.memory_analysis().alias_size_in_bytes
    )
    assert "all-reduce over batch" in found.text
    assert "jit_step" in found.html
    assert found.json == found.report.model_dump(mode="json")


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("batch")], ids=["whole", "split"])
def test_a_gradient_that_is_used_in_parts_should_be_scattered(spec):
    """XLA for CPUs sums it whole, and each device takes its part."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("batch",))
    weights = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
    x = jax.ShapeDtypeStruct((16, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("batch")))

    def step(weights, x):
        return weights - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights)

    compiled = jax.jit(step, out_shardings=weights.sharding).lower(weights, x).compile()
    rules = {finding.rule for finding in meshloom.inspect(compiled, target="cpu-8").report.findings}
    assert ("reduced-then-sliced" in rules) == (spec == PartitionSpec("batch"))
    assert "wide-collective" in rules


def test_the_line_of_what_a_library_does_is_that_of_its_caller():
    mesh = Mesh(np.array(jax.devices()[:8]), ("batch",))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("batch")))

    def norm(x):
        return optax.tree.norm(x)  # the line

    (found,) = meshloom.inspect(jax.jit(norm).lower(x), target="cpu-8").report.collectives
    file, _, number = found.line.partition(":")
    assert Path(file).name == Path(__file__).name
    assert "# the line" in Path(__file__).read_text().splitlines()[int(number) - 1]


@pytest.mark.tpu
def test_links_are_those_of_the_chips_that_the_mesh_has():
    """4 x 4 chips: a group of 2 x 2 has lines along x and y, one of four in a row along x alone. Their numbers in the
    program are the same, so a text cannot tell them apart."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    spec = read_spec(Request(("target=v5e-16",)), then=lambda spec: spec.target)
    by_place = {tuple(d.coords[:2]): d for d in find_devices(spec, plan_target(spec, "bfloat16"))}
    rows = [by_place[x, y] for y in range(4) for x in range(4)]
    squares = [by_place[x + i, y + j] for y in (0, 2) for x in (0, 2) for j in range(2) for i in range(2)]

    def gathered(devices: list[Any]) -> tuple[meshloom.Inspection, meshloom.Inspection]:
        mesh = Mesh(np.array(devices).reshape(4, 4), ("data", "model"))
        x = jax.ShapeDtypeStruct(
            (64, 2**20), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data", "model"))
        )
        out = NamedSharding(mesh, PartitionSpec("data"))
        compiled = jax.jit(lambda x: x * 2, out_shardings=out).lower(x).compile()
        return meshloom.inspect(compiled, target="v5e-16"), meshloom.inspect(compiled.as_text() or "", target="v5e-16")

    (row, text_of_row), (square, text_of_square) = gathered(rows), gathered(squares)
    times = {name: found.report.collectives[0].alone_seconds or 0
             for name, found in (("row", row), ("square", square), ("text", text_of_square))}  # fmt: skip
    assert [found.report.collectives[0].mesh_axes for found in (row, square)] == [("model",), ("model",)]
    assert times["square"] < 0.7 * times["row"]
    assert times["text"] == times["row"]
    rules = [{finding.rule for finding in found.report.findings} for found in (square, text_of_square)]
    assert ["assumed-order" in found for found in rules] == [False, True]
    assert text_of_row.report.collectives[0].mesh_axes == ("4 (stride 1)",)


def test_the_text_of_a_program_has_no_names_of_axes(compiled, tmp_path):
    found = meshloom.inspect(compiled.as_text(), target="cpu-8")
    assert {each.mesh_axes for each in found.report.collectives if each.bytes > 100} == {("4 (stride 2)",)}
    (tmp_path / "step.txt").write_text(compiled.as_text())
    assert meshloom.inspect(tmp_path / "step.txt", target="cpu-8").report == found.report
    names = {path.name for path in found.write(tmp_path / "new")}
    assert names == {"report.json", "timeline.json", "report.html"}


@pytest.mark.parametrize("target", ["h100-8", "v6e-8"])
def test_a_compiled_program_is_of_the_devices_that_it_was_compiled_for(compiled, target):
    with pytest.raises(meshloom.ConfigError, match=f"was compiled for cpu \\(cpu\\), and {target} has "):
        meshloom.inspect(compiled, target=target)


@pytest.mark.tpu
def test_a_program_for_another_chip_of_the_platform_is_an_error():
    spec = read_spec(Request(("target=v5e-4",)), then=lambda spec: spec.target)
    mesh = Mesh(find_devices(spec, plan_target(spec, "bfloat16")), ("x",))
    argument = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    compiled = jax.jit(jnp.tanh).lower(argument).compile()
    assert meshloom.inspect(compiled, target="v5e-4").report.compiled.step_seconds
    with pytest.raises(meshloom.ConfigError, match="was compiled for TPU v5 lite \\(tpu\\), and v6e-4 has TPU v6 lite"):
        meshloom.inspect(compiled, target="v6e-4")


@pytest.mark.parametrize(
    ("program", "target", "said"),
    [
        (lambda x: x, "cpu-8", "a function is not a compiled program"),
        ("nowhere.txt", "cpu-8", "there is no such file"),
        ("HloModule f\n", None, "it is missing"),
        ("HloModule f\n", "v5pp-8", "there is no 'v5pp-8' in this group"),
    ],
)
def test_a_mistake_is_one_error(program, target, said):
    with pytest.raises(meshloom.ConfigError) as error:
        meshloom.inspect(program, target=target)
    (problem,) = error.value.problems
    assert said in problem.what
