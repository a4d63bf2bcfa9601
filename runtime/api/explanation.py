"""A plan in words, as JSON and as a table."""

import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.report.explain import explain as print_plan
from meshloom.compiler.report.explain import plan_as_json

from .declared import Plan, plan, specs_of

WIDTH = 200  # of tables, in characters


@dataclass(frozen=True, repr=False)
class Explanation:
    """What lies where and why, bytes per device, communication, and the least that a step takes."""

    plan: Plan

    @cached_property
    def text(self) -> str:
        """Returns what `meshloom explain` prints."""
        out = io.StringIO()
        print_plan(self.plan, Console(out, width=WIDTH, is_terminal=False))
        return out.getvalue()

    @cached_property
    def json(self) -> dict[str, Any]:
        """Returns what plan.json of a run holds."""
        return plan_as_json(self.plan)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


def explain(*declared: str | RunSpec | Plan) -> Explanation:
    """Explains a plan, a declaration, or the declaration that overrides compose. Raises ConfigError with all that
    is wrong."""
    planned = next((each for each in declared if isinstance(each, Plan)), None)
    if planned is not None and len(declared) == 1:
        return Explanation(planned)
    return Explanation(plan(*specs_of(declared)))
