"""Chooses the variants of a space that is too large to list: Optuna tries combinations of options of config groups.

A trial is one combination, priced on all its meshes with all its microbatches at once; its value is the best of these.
Trials are saved in the run directory, so that the same command in the same directory continues the search.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import human_bytes, human_seconds
from meshloom.compiler.declare.compositions import compositions_kept
from meshloom.compiler.tune.answer import TOO_LARGE, Runner, value_of_variants
from meshloom.compiler.tune.space import GroupChoices, Variant, num_points

from ..processes.process_log import say
from .variants import Space

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.jsonl"
PER_ROUND = 4  # trials that are requested at once, so that their programs are traced side by side
MOST_ASKED = 4  # times tune.num_trials: Optuna may propose a combination again
NUM_CHOSEN = 8  # best variants, which are then searched as a listed space is


def choose_variants(space: Space, run: Runner, run_dir: Path, console: Console) -> tuple[Variant, ...]:
    """Returns the best variants that Optuna finds in `tune.num_trials`. Raises ConfigError if it is not installed."""
    tune = space.spec.tune
    number = min(tune.num_trials, len(space.choices))
    study = _open_study(space, run_dir / JOURNAL)
    values = _known_values(study)
    say(console, f"about {space.about_num_candidates:,} candidates: Optuna tries {number:,} of {len(space.choices):,} "
        f"combinations of {', '.join(space.groups)}" + f"; {len(values):,} are known" * bool(values))  # fmt: skip
    with compositions_kept():
        for _ in range(0, MOST_ASKED * tune.num_trials, PER_ROUND):
            if len(values) >= number:
                break
            _run_round(study, space, values, run, min(PER_ROUND, number - len(values)))
            say(console, f"{len(values):,} of {number:,} tried; the best so far: {_best(values, tune.objective)}")
        return _chosen(space, values)


def _run_round(
    study: "optuna.Study", space: Space, values: dict[GroupChoices, float], run: Runner, number: int
) -> None:
    """Asks Optuna for some trials, and reports their values. A known trial is reported again."""
    import optuna  # noqa: PLC0415 (an extra)

    options = {group: optuna.distributions.CategoricalDistribution(found) for group, found in space.groups.items()}
    trials = [study.ask(dict(options)) for _ in range(number)]
    asked = [_choices(trial.params) for trial in trials]
    new = [choices for choices in dict.fromkeys(asked) if choices not in values]
    if new:
        values |= zip(new, value_of_variants([space.variant(choices) for choices in new], run), strict=True)
    for trial, choices in zip(trials, asked, strict=True):
        study.tell(trial, values[choices])


def _open_study(space: Space, journal: Path) -> "optuna.Study":
    """Returns the study of this space from the journal: the one that an earlier start has left, or a new one."""
    try:
        import optuna  # noqa: PLC0415 (an extra)
        from optuna.storages import JournalStorage  # noqa: PLC0415
        from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415
    except ImportError:
        what = f"the space has about {space.about_num_candidates:,} candidates, more than tune.max_candidates="
        what += f"{space.spec.tune.max_candidates:,}, and Optuna, which searches such a space, is not installed"
        fix = "pip install 'meshloom[optuna]', narrow tune.groups or tune.mesh, or set tune.max_candidates"
        raise ConfigError([Problem("tune", what, fix)]) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    name = _identity(space)
    known = next((one.n_trials for one in optuna.get_all_study_summaries(storage) if one.study_name == name), 0)
    # The seed differs when a search continues: otherwise its first trials would be known ones.
    sampler = optuna.samplers.TPESampler(seed=known, constant_liar=True)
    return optuna.create_study(storage=storage, study_name=name, sampler=sampler, load_if_exists=True)


def _identity(space: Space) -> str:
    """Returns a name that only the same declaration with the same options has."""
    declared: Any = space.spec.model_dump(mode="json")
    for limit in ("num_trials", "num_shown", "num_compiled"):  # the same search may go on with more
        del declared["tune"][limit]
    text = json.dumps([declared, [list(choices) for choices in space.choices]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _known_values(study: "optuna.Study") -> dict[GroupChoices, float]:
    return {_choices(one.params): one.value for one in study.trials if one.value is not None}


def _choices(parameters: dict[str, str]) -> GroupChoices:
    return tuple(parameters.items())


def _best(values: dict[GroupChoices, float], objective: str) -> str:
    choices, value = min(values.items(), key=lambda item: item[1])
    if value >= TOO_LARGE:
        return "none fits yet"
    shown = human_bytes(int(value)) if objective == "memory" else human_seconds(value)
    return f"{shown}, {' '.join(f'{group}={option}' for group, option in choices)}"


def _chosen(space: Space, values: dict[GroupChoices, float]) -> tuple[Variant, ...]:
    """Returns the best of the tried variants, at most as many as a listed space may have."""
    order: Sequence[GroupChoices] = sorted(values, key=lambda choices: values[choices])
    found: list[Variant] = []
    left = space.spec.tune.max_candidates
    for choices in order[:NUM_CHOSEN]:
        variant = space.variant(choices)
        if found and num_points(variant) > left:
            break
        left -= num_points(variant)
        found.append(variant)
    return tuple(found)
