"""What was declared and decided, as files of a run directory."""

from pathlib import Path

import yaml

from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import plan_as_json

from ..core.files import replace_json, replace_text
from .find_runs import PLAN, SPEC


def write_declaration(plan: Plan, run_dir: Path) -> None:
    """Writes spec.yaml, the resolved declaration, and plan.json, what was decided from it."""
    replace_text(run_dir / SPEC, yaml.safe_dump(plan.spec.as_written(), sort_keys=False))
    replace_json(run_dir / PLAN, plan_as_json(plan))
