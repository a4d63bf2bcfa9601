"""docs/extend.md works: its files, installed as a package, run on every layout, and mistakes in them are told."""

import json
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hydra.core.plugins import Plugins
from safetensors.numpy import load_file, save_file

import meshloom as package_under_test
from conftest import plan_of, spec_of
from meshloom.compiler.core import user_code
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.declare.published_folder import understood
from meshloom.compiler.driver import plan_run
from meshloom.models.published import registry, tensors
from meshloom.runtime.weights.find import PublishedWeights, find_weights
from support.commands import Ended, run_python
from support.programs import gradients_of
from support.published import write_published
from support.reference import reference_loss
from support.tiers import tiered

DOCS = Path(__file__).parents[3] / "docs" / "extend.md"
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "my-package"
version = "1"
{entry_points}
[tool.hatch.build.targets.wheel]
packages = ["my_package", "hydra_plugins"]
"""
DOCUMENTS = """
from meshloom.runtime.data import DataSource

class Documents(DataSource):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return f"document {index} " * 10
"""
# Keys of the decoder that conftest sets are taken away again.
DECODER_KEYS = ("num_heads", "num_kv_heads", "head_dim", "mlp_dim", "initializer_stddev")
MODEL = (
    *search_path_override(["hydra.searchpath=[pkg://my_package.conf]"], config_dir=None),
    "model=convolution",
    *(f"~model.{key}" for key in DECODER_KEYS),
)


def pyproject() -> str:
    (entry_points,) = re.findall(r"^```toml\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    return PYPROJECT.replace("{entry_points}", entry_points)


def files_of_the_page() -> dict[str, str]:
    """Code blocks of docs/extend.md whose first line is a comment with a path."""
    blocks = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    assert len(blocks) == 9
    return dict(blocks)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Iterator[Path]:
    """The environment that the page's package is installed in, one of this process too while these tests run."""
    source, environment = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    installed = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    folders = ("my_package", "my_package/conf")
    page = files_of_the_page()
    mine = {"my_package/conf/model/mine.yaml": page["my_package/conf/model/convolution.yaml"]}
    files = page | mine | {f"{folder}/__init__.py": "" for folder in folders} | {"pyproject.toml": pyproject()}
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    Plugins.instance()  # looks for plugins once in a process: not for this package's, which other tests would see
    sys.path.insert(0, str(installed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "PREFIXES", [*site.PREFIXES, str(environment)])
        yield environment
    sys.path.remove(str(installed))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


def meshloom(package: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in the package's environment, which takes all else from that of the tests."""
    ours = Path(package_under_test.__file__).parents[1]  # an editable install's own folder is not followed from another
    # More than one where a .pth file of the environment names the packages of another.
    installed = [path for path in sys.path if Path(path).name == "site-packages" and not path.startswith(str(package))]
    paths = [str(ours), *filter(None, [os.environ.get("PYTHONPATH")]), *installed]
    return subprocess.run(
        [package / "bin" / "python", "-m", "meshloom", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip


SHORT = ("num_steps=2", "sequence_length=32", "checkpoint=disabled", "evaluation.num_batches=1", "hydra.run.dir=run")


def lines_of_the_page() -> list[str]:
    """Commands of docs/extend.md, without what follows them in comments."""
    lines = re.findall(r"^    (meshloom .*?)(?: +#.*)?$", DOCS.read_text(), re.M)
    assert len(lines) == 4
    return lines


@pytest.mark.ci
@pytest.mark.parametrize("number", range(3))
def test_the_commands_of_the_page_run_as_typed(package, tmp_path, number):
    """Each in a process of its own, in a folder with what the page says of it; two short steps instead of 300."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        files_of_the_page()["my_package/conf/model/convolution.yaml"]
    )
    (tmp_path / "my_code.py").write_text(DOCUMENTS)
    _, *words = shlex.split(lines_of_the_page()[number])
    done = meshloom(package, tmp_path, *words, *SHORT)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.ci
def test_an_installed_package_trains_its_model_with_its_optimizer_on_its_data(package, tmp_path):
    """Found by the search-path plugin: nothing but the names is said. With the page's line that names its tracker."""
    _, *words = shlex.split(lines_of_the_page()[3])
    done = meshloom(package, tmp_path, *words, "model=convolution", "optimizer=sign", "data=counting", *SHORT)
    assert done.returncode == 0, done.stderr
    losses = (tmp_path / "run" / "losses.txt").read_text().splitlines()
    assert [line.split()[0] for line in losses] == ["1", "2"]
    spec = (tmp_path / "run" / "spec.yaml").read_text()
    assert all(f"my_package.{name}" in spec for name in ("models:Conv", "optimizers:Sign", "data:Counting"))


LAYOUTS = {
    "ddp": ("sharding=ddp",),
    "fsdp, microbatches": ("sharding=fsdp", "num_microbatches=2"),
    "tensor": ("sharding=tensor", "remat=full"),
    "fsdp and tensor": ("sharding=fsdp_tensor", "remat=save_dots"),
    "zero2": ("sharding=zero2", "loss.max_logits_bytes=4096"),
}


@pytest.mark.ci
def test_a_folder_of_a_registered_family_is_read_and_written(package, tmp_path, monkeypatch):  # noqa: ARG001
    """In this process the page's module has not been imported: the entry point of its package is found."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(user_code, "_REGISTERING", set())
    config = spec_of(*MODEL).model
    shapes = understood(lambda: {each.name: each.shape for each in tensors(config)}, "model")
    assert (shapes["layers.1.up.weight"], shapes["head.weight"]) == ((128, 32), (264, 32))
    values = write_published(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "convolution"
    words = (f"model.path={tmp_path}", "target=cpu-4", "sharding=fsdp", "global_batch_size=4", "sequence_length=16")
    plan = read_spec(Request(("model=from_hf", "model.reach=3", *words)), plan_run)
    assert plan.spec.model.model_dump() == config.model_dump() | {"reach": 3}
    with pytest.raises(ConfigError, match=r"layers.0.mix.weight is .* there, \[3, 32\]"):
        find_weights(plan)
    found = find_weights(read_spec(Request(("model=from_hf", *words)), plan_run))
    assert isinstance(found, PublishedWeights)
    assert {each.tensor.name for each in found.matched.taken} == values.keys()
    *_, family = registry.known_families()
    with pytest.raises(ValueError, match="llama is the name of another family"):
        registry.register(replace(family, model_type="llama", architecture="Mine"))
    registry.register(
        replace(family, rows=lambda config: tuple(row for row in family.rows(config) if "mix" not in row.name))
    )
    with pytest.raises(ConfigError, match="no tensor of convolution holds layers/mix"):
        understood(lambda: tensors(config), "model")


ATTENDING = """
import jax, jax.numpy as jnp
from flax import nnx
from pydantic import PositiveInt
from meshloom.models import Context, Mask, Model, ModelConfig, Stack, build_piece
from meshloom.models.published import Family, Row, key, linear, ours, register, same

class Config(ModelConfig):
    width: PositiveInt
    depth: PositiveInt

    def build(self):
        make = lambda kind: build_piece(lambda rngs: kind(self, rngs))
        return Model(make(Embed), (Stack("blocks", make(Block), self.depth),), make(Head))

def parameter(rngs, axes, *shape):
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[0] ** -0.5, out_sharding=axes)

class Embed(nnx.Module):
    def __init__(self, config, rngs):
        self.table = parameter(rngs, ("vocab", "embed"), config.vocab_size, config.width)
    def __call__(self, tokens, context):
        return context.activation("embedded", self.table[tokens], "batch", "length", "embed")

class Block(nnx.Module):
    def __init__(self, config, rngs):
        self.kv = parameter(rngs, ("embed", "mlp"), config.width, config.width)
    def __call__(self, x, context):
        k = context.remember("keys", (x @ self.kv[...])[:, :, None], "batch", "length", None, None)
        y = context.attend(x[:, :, None], k, k, scale=1.0, mask=Mask(window=None), soft_cap=None)
        return context.activation("residual", x + y[:, :, 0], "batch", "length", "embed")

class Head(nnx.Module):
    def __init__(self, config, rngs):
        self.kernel = parameter(rngs, ("embed", "vocab"), config.width, config.vocab_size)
    def __call__(self, x, context):
        return context.activation("logits", x @ self.kernel[...], "batch", "length", "vocab")

ROWS = (
    Row("wte", ("embed/table",), same), Row("h.{layer}.kv", ("kv",), linear()), Row("out", ("head/kernel",), linear()),
)
TABLE = (*ours(family="my_code:Config"), *(key(name, name) for name in ("vocab_size", "width", "depth")))
register(Family("MineForCausalLM", "mine", rows=lambda config: ROWS, table=TABLE, prefix=""))
"""


@pytest.mark.ci
def test_a_folder_of_a_family_that_is_opted_into_is_explained_generated_from_and_exported(tmp_path):
    """Each command in a process of its own. The text is that of the model in NumPy, greedily."""
    (tmp_path / "my_code.py").write_text(ATTENDING)
    rng, (width, depth, vocab) = np.random.default_rng(0), (16, 2, 264)
    shapes = {"wte": (vocab, width), "h.0.kv": (width, width), "h.1.kv": (width, width), "out": (vocab, width)}
    values = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    said = {"model_type": "mine", "vocab_size": vocab, "width": width, "depth": depth, "dtype": "float32"}
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text(json.dumps(said))
    save_file(values, tmp_path / "there/model.safetensors", {"format": "pt"})
    allow, where = "--allow-code-from=my_code", ("target=cpu-1", "precision=float32")

    def run(*words: str) -> Ended:
        return run_python("-m", "meshloom", *words, cwd=tmp_path)

    refused = run("explain", "model=from_hf", "model.path=there", *where)
    assert "model_type: 'mine' is not implemented" in " ".join(refused.stderr.split())
    explained = run("explain", "model=from_hf", "model.path=there", allow, *where, "sequence_length=16")
    assert "blocks/kv" in explained.stdout, explained.stderr
    exported = run("export", "there", allow, "directory=out", "dtype=float32", *where)
    assert exported.returncode == 0, exported.stderr
    assert load_file(tmp_path / "out/model.safetensors").keys() == values.keys()
    assert json.loads((tmp_path / "out/config.json").read_text())["width"] == width
    words = ("prompt=ab", "max_new_tokens=4", "temperature=0", "--json")
    generated = run("generate", "out", allow, *words, *where)
    assert generated.returncode == 0, generated.stderr
    tokens = [*b"ab"]
    for _ in range(4):
        x = values["wte"][tokens].astype(np.float64)
        for block in range(depth):
            k = x @ values[f"h.{block}.kv"].T
            scores = np.exp(np.where(np.tri(len(x)) > 0, x @ k.T, -np.inf))
            x = x + scores / scores.sum(1, keepdims=True) @ k
        tokens.append(int((x[-1] @ values["out"].T).argmax()))
    assert json.loads(generated.stdout.splitlines()[-1])["tokens"] == tokens[2:]


@pytest.mark.parametrize("layout", tiered(LAYOUTS, plain=()))
def test_a_users_model_has_every_sharding_and_remat(package, layout, tokens):  # noqa: ARG001 (installs it)
    plan = plan_of(*MODEL, *LAYOUTS[layout])
    params = plan.model.init(jax.random.key(0))
    inputs, targets = jnp.asarray(tokens[0][:, :-1]), jnp.asarray(tokens[0][:, 1:])
    expected_loss, expected = jax.jit(jax.value_and_grad(lambda p: reference_loss(plan.model, p, inputs, targets)))(
        params
    )
    loss, gradients = gradients_of(plan, params, tokens[0])
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, expected)


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.reech=2", ["model.reech: there is no such key", "did you mean 'reach'?"]),
        ("model.reach=two", ["model.reach: 'two' is not a whole number"]),
        ("model.family=my_package.models:Convolution", ["has no 'Convolution'", "did you mean 'ConvolutionConfig'?"]),
        ("model.family=my_package.models:Embed", ["Embed' is not a class that derives from ModelConfig"]),
        ("model.family=my_package.modles:ConvolutionConfig", ["there is no module 'my_package.modles'"]),
    ],
)
def test_mistakes_about_a_users_model_are_told_as_those_about_ours(package, override, told):  # noqa: ARG001
    with pytest.raises(ConfigError) as error:
        spec_of(*MODEL, override)
    assert all(text in str(error.value) for text in told), error.value


BROKEN = {
    "while it is imported": ("import no_such_library", "No module named 'no_such_library'"),
    "while it is built": (
        "class Mine(ConvolutionConfig):\n    def build(self):\n        return 1 / 0",
        "ZeroDivisionError",
    ),
    "while it is traced": (
        """
        class BadHead(Head):
            def __call__(self, x, context):
                return super().__call__(x[..., :3], context)

        class Mine(ConvolutionConfig):
            def build(self):
                return replace(super().build(), head=build_piece(lambda rngs: BadHead(self, rngs)))
        """,
        "TypeError",
    ),
    "for want of axes": (
        """
        class Bare(Head):
            def __init__(self, config, rngs):
                self.kernel = nnx.Param(jnp.zeros((4, 4)))

        class Mine(ConvolutionConfig):
            def build(self):
                return replace(super().build(), head=build_piece(lambda rngs: Bare(self, rngs)))
        """,
        "needs out_sharding with 2 names",
    ),
}


@pytest.mark.parametrize("when", BROKEN)
def test_an_exception_in_a_users_code_is_told_with_their_line(package, tmp_path, monkeypatch, when):  # noqa: ARG001
    body, told = BROKEN[when]
    name = "broken_" + when.replace(" ", "_")
    head = "from dataclasses import replace\nimport jax.numpy as jnp\nfrom flax import nnx\n"
    head += "from my_package.models import ConvolutionConfig, Head, build_piece\n"
    (tmp_path / f"{name}.py").write_text(head + textwrap.dedent(body) + "\n")
    monkeypatch.chdir(tmp_path)
    with code_allowed_from([name]), pytest.raises(ConfigError) as error:
        plan_of(*MODEL, f"model.family={name}:Mine")
    assert told in str(error.value)
    assert re.search(rf"{name}\.py:\d+: \S", str(error.value)), error.value
    assert not re.search(r"site-packages/(?!my_package)", str(error.value))
