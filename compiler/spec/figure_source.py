"""Where a figure of the cost model is from, and what of it nobody measured: one type for chips, kernels and tables."""

from typing import Any, Self

from pydantic import model_serializer, model_validator

from meshloom.models.record import Record, mistake

from ..core.config_types import Text


class FigureSource(Record):
    """Where a figure is from. A text alone is `measured`.

    measured: a page, a document, or what it was measured in. assumed: what of the figure is an assumption, and why."""

    measured: Text | None = None
    assumed: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"measured": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.measured is None and self.assumed is None:
            raise mistake("it says nothing", "give a text, or {measured: .., assumed: ..}")
        if self.assumed is None and "assumption" in (self.measured or "").lower():
            raise mistake("it says that it is an assumption, and counts as measured", "give {assumed: ..}")
        return self

    @model_serializer
    def _as_text(self) -> str | dict[str, str | None]:
        if self.assumed is None and self.measured is not None:
            return self.measured
        return {"measured": self.measured, "assumed": self.assumed}
