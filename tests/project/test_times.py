"""The processor seconds of tests by folder, against the table of docs/testing.md."""

from support.times import PAGE, by, folder_of, grown, longest_first, read_table

TABLE = """
| folder | plain | ci |
|---|---|---|
| `tests/models` | 10 | 0 |
| `tests/compiler/step` | 40 | 200 |
"""


def test_a_folder_that_takes_clearly_more_has_grown():
    table = read_table(TABLE)
    assert table["ci"] == {"tests/models": 0, "tests/compiler/step": 200}
    assert grown(table["plain"], {"tests/models": 14.9, "tests/compiler/step": 49.9}) == []  # 5 s, or a quarter
    (line,) = grown(table["plain"], {"tests/models": 15.1, "tests/compiler/step": 50})
    assert line.startswith("tests/models grew: 15 s")
    (line,) = grown(table["ci"], {"tests/new": 6, "tests/compiler/step": 249})
    assert line.startswith("tests/new grew: 6 s")


def test_seconds_are_added_up_by_folder_and_file():
    tests = {"tests/compiler/step/test_a.py::test_x[a/b]": 1.0, "tests/compiler/step/test_a.py::test_y": 2.0,
             "tests/models/test_b.py::test_z": 4.0}  # fmt: skip
    assert by("folder", tests) == {"tests/models": 4.0, "tests/compiler/step": 3.0}
    assert by("file", tests) == {"tests/models/test_b.py": 4.0, "tests/compiler/step/test_a.py": 3.0}
    assert folder_of("tests/compiler/xla/deep/test_c.py::test_q") == "tests/compiler/xla"


def test_tests_of_long_folders_run_first():
    tests = ["tests/new/test_z.py::test_z", "tests/models/test_b.py::test_z", "tests/compiler/step/test_b.py::test_x",
             "tests/compiler/step/test_a.py::test_y"]  # fmt: skip
    assert longest_first(tests, read_table(TABLE)) == [2, 3, 1, 0]


def test_the_page_has_what_both_tiers_take():
    assert {"plain", "ci"} <= read_table(PAGE.read_text()).keys()
