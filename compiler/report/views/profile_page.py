"""`profile.html`: the measured step beside the predicted one, on one time axis; one page that needs nothing else."""

from collections.abc import Iterable
from typing import Any

from ...profile.account import execution_events, roles_of
from ...profile.compare import ProfileReport
from ...profile.prediction import Prediction
from ...profile.trace import Execution
from ...schema import Event
from .page import compact_timeline, policy_hash, template_environment, template_source
from .profile_facts import alone, name_of, spread, traced

NUM_OPERATIONS = 400  # on the page, those that differ most; profile.json has all


def render_profile(report: ProfileReport, prediction: Prediction, execution: Execution) -> str:
    """Returns the whole page as text. execution: whose timeline is shown."""
    environment = template_environment()
    script, style = (template_source(environment, name) for name in ("page.js", "page.css"))
    where = f"step {execution.step}" if execution.step is not None else "a step"
    return environment.get_template("profile.html.jinja").render(
        report=report,
        title=f"{report.model} on {report.target}",
        traced=traced(report),
        spread=spread(report),
        shown=f"{where} on device {execution.device} of process {execution.process}",
        kinds=[(name_of(row), row) for row in report.kinds],
        operations=[alone(row) for row in report.operations[:NUM_OPERATIONS]],
        reasons=list(dict.fromkeys(report.unknown.values())),
        timeline=_timeline(prediction, execution),
        report_json=report.model_dump(mode="json"),
        script=script,
        style=style,
        script_hash=policy_hash(script),
        style_hash=policy_hash(style),
    )


def _timeline(prediction: Prediction, execution: Execution) -> dict[str, Any]:
    """Returns predicted and measured lanes, compute before links, and of each track the predicted one first."""
    sources = {each.name: each.source for each in prediction.compute}
    sources |= {each.report.name: each.report.source for each in prediction.collectives}
    measured = execution_events(execution, roles_of(prediction))
    return compact_timeline(_marked(prediction.events, "predicted", sources), _marked(measured, "measured", sources))


def _marked(events: Iterable[Event], mark: str, sources: dict[str, str]) -> tuple[Event, ...]:
    return tuple(
        event.model_copy(
            update={
                "track": f"{mark} {event.track}",
                "arguments": event.arguments | ({"source": sources[event.name]} if event.name in sources else {}),
            }
        )
        for event in events
    )
