"""The ticks of the recorded pipelines, and of others written by hand."""

STAGES, MICROBATCHES = 4, 8
Rows = tuple[tuple[tuple[tuple[str, int], ...], ...], ...]


def table(*rows: str) -> Rows:
    """A table of rows such as 'F0 | BW1 F0': the slots of each stage, with their microbatches. Each stage has one chunk
    of the layers."""

    def slots(text: str, stage: int) -> tuple[tuple[str, int], ...]:
        return tuple((each.rstrip("0123456789"), stage) for each in text.split())

    return tuple(tuple(slots(text, stage) for stage, text in enumerate(row.split("|"))) for row in rows)


def ticks(first: int) -> Rows:
    """The forward slot of a microbatch one tick later on each stage; backward the other way, the last stage's from the
    tick `first` on."""
    rows = [[""] * STAGES for _ in range(first + MICROBATCHES + STAGES - 1)]
    for stage in range(STAGES):
        for microbatch in range(MICROBATCHES):
            rows[stage + microbatch][stage] += f" F{microbatch}"
            rows[first + STAGES - 1 - stage + microbatch][stage] += f" BW{microbatch}"
    return table(*(" | ".join(row) for row in rows))


ONE_F_ONE_B, GPIPE = ticks(STAGES - 1), ticks(STAGES - 1 + MICROBATCHES)
DEVICES = [device // 2 for device in range(2 * STAGES)]
