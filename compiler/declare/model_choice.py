"""The name of a run's model: the option that `model=` chose, with the keys that differ from its file."""

import json
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from ..core.format import human_names
from .compose import Request, hydra_arguments, hydra_session
from .compositions import compose_kept
from .problems import ConfigGroups

NUM_CHANGES = 2  # changed keys that are named


def model_of(request: Request) -> str | None:
    """Returns the same for a valid request, without Hydra being set up."""
    overrides = hydra_arguments(request)
    with hydra_session(request) as groups:
        composed = compose_kept(request.config_name, request.config_path, overrides, groups)
        return chosen_model(composed, composed.hydra)


def chosen_model(composed: DictConfig, hydra: HydraConf) -> str | None:
    """Returns 'llama2_7b', or 'llama2_7b (num_layers=4)' if something sets model.num_layers=4.

    hydra: Hydra's own node of the same composition; Hydra must still be set up. Returns None if no option is chosen, or
    if the family differs from the option's, whose name would then be misleading.
    """
    option = hydra.runtime.choices.get("model")
    if option is None:
        return None
    places = [text for text in hydra.overrides.hydra if text.startswith("hydra.searchpath=")]
    beside = compose_kept(str(hydra.job.config_name), None, [*places, f"+model@plain={option}"], ConfigGroups())
    model, plain = (OmegaConf.to_container(node, resolve=False) for node in (composed.model, beside.plain))
    assert isinstance(model, dict)
    assert isinstance(plain, dict)
    if model["family"] != plain.get("family"):
        return None
    changes = [f"{key}={_as_typed(value)}" for key, value in model.items() if key not in plain or plain[key] != value]
    changes += [f"~{key}" for key in plain if key not in model]
    return f"{option} ({human_names(changes, NUM_CHANGES)})" if changes else str(option)


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
