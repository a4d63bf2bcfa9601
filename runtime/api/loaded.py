"""Opens the weights of a run or of a published folder, for a program that computes with them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import human_parameters
from meshloom.compiler.core.user_code import parse_allowed
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.step.decode import build_logits, check_generates
from meshloom.models import Model, Params

from ..data.tokenizers import Tokenizer
from ..inference.generation_job import DeclaredPrompt, PromptMaker, tokenizer_of
from ..inference.open_weights import Session, open_weights, start_session
from ..inference.run_request import request_of_run
from .declared import Plan, check_overrides, library_call, settings_put_back, shown_as, warn


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """Weights on the devices, with what they mean.

    params: the parameters, a nested dict of `jax.Array`, as the plan lays them out. plan: model, mesh and layouts.
    place, step: where they came from; step is None for published weights.
    """

    params: Params
    plan: Plan
    mesh: Mesh
    place: str
    step: int | None
    _tokenizer: Tokenizer | ConfigError

    @property
    def model(self) -> Model:
        """Returns the model: pure functions of parameters."""
        return self.plan.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the weights. Raises ConfigError where there is none, as with synthetic data."""
        if isinstance(self._tokenizer, ConfigError):
            raise self._tokenizer
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, as `generate` reads it: a published model may need a token before it."""
        return list(PromptMaker.of(self.plan.spec, self.tokenizer).make(DeclaredPrompt("text", text)).tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self.tokenizer.decode([int(token) for token in tokens])

    def logits(self, tokens: Any, params: Params | None = None) -> jax.Array:
        """Returns the float32 logits after each token: (length, vocabulary) of the tokens of one text, (batch, length,
        vocabulary) of several of one length.

        params: others than the loaded ones. The function may be called within `jax.jit`, and differentiated by them.
        Raises ConfigError for tokens that the model does not know.
        """
        rows = jnp.asarray(tokens if isinstance(tokens, Tracer) else self._checked(tokens), jnp.int32)
        found = self._program(self.params if params is None else params, jnp.atleast_2d(rows))
        return found[0] if rows.ndim == 1 else found

    def _checked(self, tokens: Any) -> np.ndarray:
        what, known = "", self.plan.spec.model.vocab_size
        try:
            rows = np.asarray(tokens)
        except ValueError:
            raise _wrong("they are neither one list of numbers nor lists of one length") from None
        if rows.ndim not in (1, 2) or not np.issubdtype(rows.dtype, np.integer) or not rows.size:
            what = f"they are an array of shape {rows.shape} and type {rows.dtype}"
        elif int(rows.max()) >= known or int(rows.min()) < 0:
            what = f"they go from {int(rows.min())} to {int(rows.max())}, and the model knows 0 to {known - 1}"
        elif (longest := self.model.max_length) is not None and rows.shape[-1] > longest:
            what = f"there are {rows.shape[-1]}, and the model has {longest} positions"
        if what:
            raise _wrong(what)
        return rows

    @cached_property
    def _program(self) -> Any:
        plan, mesh = self.plan, self.mesh.abstract_mesh
        compute = build_logits(plan.model, plan.spec.sharding, plan.mesh, plan.weights)

        def within(params: Params, tokens_BT: jax.Array) -> jax.Array:
            with jax.sharding.use_abstract_mesh(mesh):
                return compute(params, tokens_BT)

        return jax.jit(within)

    def __repr__(self) -> str:
        size = f"{human_parameters(self.plan.num_parameters)} parameters"
        step = "" if self.step is None else f"step {self.step} of "
        return f"<LoadedModel: {size}, {step}{self.place}, on {self.plan.target.name}>"


def _wrong(what: str) -> ConfigError:
    return ConfigError([Problem("tokens", what, "give the tokens of a text: loaded.logits(loaded.encode('...'))")])


def load(place: str | PathLike[str], *overrides: str, allow_code_from: Sequence[str] = ()) -> LoadedModel:
    """Opens weights: of a run directory, RUN/checkpoints/STEP, or a folder of published weights.

    They are opened by what their checkpoint says of model, adapter and tokenizer. overrides: as after `meshloom
    generate RUN`; "target=cpu-1" or "target=local" opens them on other devices than those of the run. allow_code_from:
    names of modules whose code the run may use. Raises ConfigError with all problems.
    """
    modules = parse_allowed(tuple(allow_code_from), "allow_code_from")

    def start(spec: Any) -> Session:
        session = start_session(spec, warn)
        check_generates(session.plan.spec, session.plan.model, session.plan.ops)
        return session

    with settings_put_back(), library_call(modules):
        session = read_spec(request_of_run(fspath(place), check_overrides(overrides)), then=start)
        tokenizer = _tokenizer_of(session)
        identity = None if isinstance(tokenizer, ConfigError) else asdict(tokenizer.identity)
        named = identity and {f"data.tokenizer.{key}": value for key, value in identity.items()}
        weights = open_weights(session, Console(is_quiet=True), named)
    plan = shown_as(Plan, session.plan)
    return LoadedModel(weights.params, plan, session.mesh, weights.place, weights.step, tokenizer)


def _tokenizer_of(session: Session) -> Tokenizer | ConfigError:
    """Returns the tokenizer, or why there is none: parameters alone do not need it."""
    try:
        return tokenizer_of(session.plan.spec.data)
    except ConfigError as error:
        return error
