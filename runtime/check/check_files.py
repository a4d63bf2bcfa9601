"""Saves, restores and exports the small state of a check, by the code that a run uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.places import PUBLISHED
from meshloom.compiler.core.trees import combined
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.models.adapter import merged

from ..checkpoint.checkpoints import Checkpoints, restore
from ..checkpoint.find import Checkpoint
from ..weights.export import prepare_export, run_export
from ..weights.find import find_weights
from ..weights.load import load_params
from .programs import SmallPlan

MOST_PARAMETERS = 200_000_000  # of a declared folder whose logits are compared: two float32 copies and their products


class NoPlace:
    """Takes the place of an iterator over batches: a check's state came from none."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}

    def get_state(self) -> dict[str, int]:
        """Returns nothing to save."""
        return {}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Goes nowhere."""


@dataclass(frozen=True)
class CheckFiles:
    """The files of a check. on: the plan whose state they hold. folder: an empty directory."""

    on: SmallPlan
    folder: Path

    def saved_and_restored(self, state: Any, *, step: int) -> Any:
        """Saves a state of the host from its devices, and returns what a run that goes on restores, on the devices."""
        spec = self._spec({"every_num_steps": 1})
        placed = self.on.state(state)
        with Checkpoints(self.folder, spec) as checkpoints:
            checkpoints.save(step, placed, NoPlace(), num_tokens=0, eval_loss=None)
            checkpoints.wait()
        found = Checkpoint(self.folder / "checkpoints" / str(step), step, True, {})
        restored = restore(found, self.on.abstract, NoPlace()).state
        return restored | {
            "params": combined(placed["params"], restored["params"])
        }  # of adapters the base is not saved

    def exported(self, params: Any) -> Path:
        """Exports what `saved_and_restored` has saved, and returns the folder. params: of the state on its devices, for
        adapters, which are merged first. Raises ConfigError for a model that no published family describes."""
        out, model = self.folder / "exported", self.on.plan.model
        spec = self._spec({"weights_from": str(self.folder)})
        export = spec.export.model_copy(update={"directory": str(out), "dtype": "float32", "format": "huggingface"})
        spec = spec.model_copy(update={"export": export})
        run_export(prepare_export(spec, lambda _: merged(model, params)), Console(is_quiet=True))
        return out

    def read(self, out: Path) -> Any:
        """Returns the parameters of an exported folder, on the host. Those of adapters are drawn."""
        plan = self.on.plan
        weights = find_weights(plan, f"{PUBLISHED}{out}")
        return jax.tree.map(np.asarray, load_params(plan, self.on.mesh, weights, Console(is_quiet=True)))

    def _spec(self, checkpoint: Mapping[str, Any]) -> RunSpec:
        spec = self.on.plan.spec
        none = {"directory": None, "restore_from": None, "weights_from": None, "base_from": None, "weights_skip": ()}
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={**none, **checkpoint})})


@dataclass(frozen=True)
class DeclaredFolder:
    """The folder of published weights that a declaration starts from, for a model of the declared size on one device.
    path: the folder. plan: of the model, in float32."""

    path: Path
    plan: Plan[RunSpec]

    def params(self) -> Any:
        """Returns the parameters of the folder, on the host."""
        on = SmallPlan(self.plan)
        return jax.tree.map(
            np.asarray, load_params(self.plan, on.mesh, find_weights(self.plan), Console(is_quiet=True))
        )


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of an exported folder by transformers, in float32."""
    import torch  # noqa: PLC0415 (takes seconds)  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from transformers.utils import logging  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
