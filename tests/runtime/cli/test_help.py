"""The help of a command is a screen, with whole words; a group lists its options."""

import pytest

from meshloom.runtime.cli import help as command_help
from meshloom.runtime.cli.commands import COMMANDS
from meshloom.runtime.cli.main import run

LINES, COLUMNS = 24, 80
DECLARED = [name for name, command in COMMANDS.items() if not command.paths]


@pytest.mark.cases(plain=3)
@pytest.mark.parametrize("name", DECLARED)
def test_it_is_a_screen_of_whole_words_with_defaults(name, capsys, monkeypatch):
    run([name, "--help"])
    whole = capsys.readouterr().out
    monkeypatch.setattr(command_help, "_width", lambda: COLUMNS)
    run([name, "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= LINES
    assert all(len(line) <= COLUMNS for line in shown.splitlines())
    assert shown.split() == whole.split()
    assert "=" in shown


def test_a_long_name_is_whole_and_apart_from_what_it_is(capsys):
    assert run(["train", "--help", "pipeline"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert {"interleaved_1f1b", "interleaved_1f1b_breadth_first", "gpipe"} <= set(names)


def test_a_word_that_is_no_group_is_an_error(capsys):
    assert run(["train", "--help", "modl"]) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err
