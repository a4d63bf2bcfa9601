"""XProf's table of a real step, judged without its program, against what XProf itself says of the step."""

import csv
import io
import json
from pathlib import Path

import pytest

from meshloom.compiler.core.known import Unknown
from meshloom.compiler.profile.compare import ProfileReport, compare_rows
from meshloom.compiler.profile.op_table import OpRow, TableError, num_executions, predict_rows, read_op_table
from meshloom.runtime.api.inspected import devices_of

MEASURED = Path(__file__).parents[3] / "bench/measured/v5p_train_step_ops.csv"
LABELS = {"hlo_op_name": "HLO op name", "hlo_op_expression": "HLO op text", "occurrences": "#Occurrences",
          "total_self_time": "Total self time (us)", "category": "HLO op category", "program_id": "Program id",
          "model_flop_rate": "Model GFLOP/s"}  # fmt: skip


def _records() -> list[dict[str, str]]:
    """The table as XProf's tool has it. The recorded file leaves out columns and names."""
    with MEASURED.open() as file:
        return [
            {"program_id": "1", "category": row["category"], "occurrences": row["occurrences"],
             "hlo_op_name": row["text"].partition(" = ")[0].lstrip("%"), "hlo_op_expression": row["text"],
             "total_self_time": str(float(row["microseconds"]) * float(row["occurrences"])),
             "model_flop_rate": row["gflops_of_core"]}
            for row in csv.DictReader(file)
        ]  # fmt: skip


def _as_csv(records: list[dict[str, str]], names: dict[str, str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([names.get(key, key) for key in records[0]])
    writer.writerows(record.values() for record in records)
    return out.getvalue()


@pytest.fixture(scope="module")
def rows() -> tuple[OpRow, ...]:
    return read_op_table(_as_csv(_records(), {}))


@pytest.fixture(scope="module")
def judged(rows) -> ProfileReport:
    devices, runs = devices_of(["target=v5p-8"]), num_executions(rows)
    return compare_rows(rows, predict_rows(rows, devices, runs), runs, "tpu")


def test_each_form_of_a_table_is_the_same(rows):
    records = _records()
    table = {"cols": [{"id": key} for key in records[0]],
             "rows": [{"c": [{"v": value} for value in record.values()]} for record in records]}  # fmt: skip
    assert read_op_table(_as_csv(records, LABELS)) == read_op_table(json.dumps(table)) == rows
    assert read_op_table(json.dumps(records)) == rows


def test_the_step_and_its_waiting_are_those_of_the_profiler(judged):
    """XProf says 120.0 ms, 26.8 % of it waiting for communication, on 4 chips in 8 steps."""
    assert judged.num_executions == 4 * 8
    assert judged.step.measured_seconds == pytest.approx(120.0e-3, rel=0.03)
    exposed = sum(row.exposed.measured_seconds for row in judged.kinds if row.exposed is not None)
    assert exposed / judged.step.measured_seconds == pytest.approx(0.268, abs=0.015)


def test_what_was_priced_right_and_wrong_is_found(judged):
    """Matmuls and sums over links are right. Attention of short sequences takes more than its price."""
    ratios = {row.kind: row.ratio for row in judged.kinds}
    assert ratios["matmul"] == pytest.approx(1, abs=0.05)
    assert ratios["reduce-scatter"] == pytest.approx(1, abs=0.1)
    assert ratios["attention"] > 1.5
    waits = next(row for row in judged.operations if row.name == "async-collective-start.3")
    assert waits.kind == "all-gather"
    assert isinstance(waits.predicted_seconds, Unknown), "what hides it is not in a table"


@pytest.mark.parametrize(
    ("text", "said"),
    [("rank,hlo_op_name\n1,a\n", "no column occurrences"),
     ("hlo_op_name,occurrences,total_self_time\na,b,1\n", "the row of a has a text where a number belongs"),
     ("hlo_op_name,occurrences,total_self_time\n", "the table has no operation"),
     ("hlo_op_name,occurrences,total_self_time\na,1e999,1\n", "the row of a has a text where a number belongs"),
     ('{"cols": [', "its JSON is not whole"), ("[1]", "no columns and rows"),
     ('{"cols": [{"id": "hlo_op_name"}], "rows": [{"v": "a"}]}', "its JSON is not"),
     ('[{"hlo_op_name": "a", "occurrences": [1], "total_self_time": 1}]', "a text where a number belongs")],
)  # fmt: skip
def test_another_text_is_refused(text, said):
    with pytest.raises(TableError, match=said):
        read_op_table(text)
