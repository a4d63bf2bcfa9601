"""Compiles a plan, and returns the step with its report."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from pydantic import PrivateAttr

from meshloom.compiler import plan as compiler_plan
from meshloom.compiler import schema
from meshloom.compiler.analysis import compiled_step
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.known import text_of
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.run_spec import Origin, RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.report.views.page import page_in_frame, render_page

from ..compile.compile_command import Compiled, CompileJob, compile_job, find_job, write_compiled
from ..core.failures import RunFailed
from ..data import open_data
from ..processes.process_log import meshloom_log
from ..rundir.folders import REPORT, RunFolder
from ..rundir.run_dir import only_run_in
from .declared import Plan, library_call, request_of_origin, settings_put_back, shown_as, start_for_compile, with_spec

PAGE = "report.html"


class Report(schema.Report):
    """The content of report.json, as typed values; a notebook shows the page of report.html."""

    _page: str | None = PrivateAttr(default=None)

    @property
    def html(self) -> str | None:
        """Returns the content of report.html; None if it is not there."""
        return self._page

    def _repr_html_(self) -> str | None:
        return None if self._page is None else page_in_frame(self._page, "Meshloom report")

    def __repr__(self) -> str:
        fits = text_of(self.compiled.fits, lambda fits: "fits" if fits else "does not fit", "memory limit unknown")
        return f"<Report: {self.program.model} on {self.target.name}, {fits}>"

    __str__ = __repr__


@dataclass(frozen=True, repr=False)
class CompiledStep(compiled_step.CompiledStep):
    """A compiled train step.

    plan: the plan with the choices of a search. report: verdict, memory, collectives, times. is_accepted: the step fits
    and exposes no more than the declaration allows. run_dir: the folder of its files; None if there is none.
    """

    report: Report
    is_accepted: bool
    run_dir: Path | None

    def __repr__(self) -> str:
        return f"<CompiledStep: {self.report!r}>"

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_()


def compile(*declared: str | RunSpec | Plan, run_dir: str | PathLike[str] | None = None) -> CompiledStep:
    """Compiles a plan, a declaration, or the declaration that overrides compose, for a target that need not be there.

    run_dir: a folder for the files of `meshloom compile`: report, artifact, log. Raises ConfigError with all problems
    of the declaration. A step that does not fit is returned; `fits` and `report` say so.
    """
    with settings_put_back():
        job = _find(declared)
        with library_call(job.plan.spec.origin.code_allowed_from), _folder(run_dir) as folder:
            compiled = _compile(job, folder)
            if run_dir is not None:
                write_compiled(compiled, folder)
    return _shown(compiled, None if run_dir is None else Path(run_dir))


def report(of: CompiledStep | str | PathLike[str]) -> Report:
    """Returns the report of a compiled step or of a run directory. Raises ConfigError if there is none."""
    if isinstance(of, CompiledStep):
        return of.report
    run_dir = Path(of)
    found, page = RunFolder(run_dir).report, run_dir / PAGE
    if found is None:
        fix = "name the run directory of a compile: meshloom.compile(..., run_dir=...) makes one"
        raise ConfigError([Problem(str(run_dir / REPORT), "there is no such file", fix)])
    return _with_page(found, page.read_text() if page.exists() else None)


def _find(declared: tuple[str | RunSpec | Plan, ...]) -> CompileJob:
    """Checks everything that can be wrong with a plan's compile; `with_spec` may run it on a part of the overrides."""
    planned = declared[0] if declared and isinstance(declared[0], Plan) else None

    def find(spec: RunSpec) -> CompileJob:
        start_for_compile(spec.target)
        return find_job(spec, lambda: planned or plan_run(open_data(spec).opened.spec if spec.counts_epochs else spec))

    return with_spec(declared, find, predicts=True)


def _compile(job: CompileJob, folder: Path) -> Compiled:
    origin = job.plan.spec.origin
    overrides = origin.overrides
    with meshloom_log(folder), only_run_in(folder):
        return compile_job(
            job,
            folder,
            overrides=overrides or (),
            model=None if overrides is None else model_of(request_of_origin(origin)),
            replan=None if overrides is None else lambda more: _replan(origin, more),
            console=Console(is_quiet=True),
        )


def _replan(origin: Origin, more: tuple[str, ...]) -> compiler_plan.Plan:
    request = request_of_origin(origin)
    return read_spec(replace(request, overrides=(*request.overrides, *more)), then=plan_run)


@contextmanager
def _folder(run_dir: str | PathLike[str] | None) -> Iterator[Path]:
    """Yields the run directory; without one, a folder for the compiler's log, which is removed unless the compiler
    fails."""
    if run_dir is not None:
        yield Path(run_dir)
        return
    folder = Path(tempfile.mkdtemp(prefix="meshloom-"))
    try:
        yield folder
    except RunFailed:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def _shown(compiled: Compiled, run_dir: Path | None) -> CompiledStep:
    step = compiled.stored.step
    page = render_page(compiled.report, step.events, step.plan)
    return shown_as(
        CompiledStep,
        replace(step, plan=shown_as(Plan, step.plan)),
        report=_with_page(compiled.report, page),
        is_accepted=not compiled.refusal,
        run_dir=run_dir,
    )


def _with_page(found: schema.Report, page: str | None) -> Report:
    made = Report.model_construct(**dict(found))
    made._page = page
    return made
