"""Every mistake gets one clear message; the whole text of each is kept in config_errors.txt.

To record new texts, run this and read the diff:

    MESHLOOM_UPDATE=1 pytest tests/compiler/declare/test_config_errors.py -n0 --tier=all
"""

import contextlib
import os
import re
import shlex
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.runtime.train.train import plan_and_check
from support.tiers import tiered
from support.wrong_data import write_wrong_data

MY_CODE = ("my_code", "my_broken_code", "my_wrong_import", "my_syntax")
FILE = Path(__file__).parent / "config_errors.txt"
FIX = re.compile(r"use ((?:mesh\.\w+|pipeline\.num_chunks|global_batch_size|num_microbatches)=\d+)")
CASES = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", FILE.read_text(), re.M))


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_of_wrong_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    write_wrong_data(folder)
    with contextlib.chdir(folder), code_allowed_from(MY_CODE):
        yield


def _told(line: str) -> str:
    try:
        read_spec(Request(tuple(shlex.split(line))), then=plan_and_check)
    except ConfigError as error:
        return str(error)
    return "nothing is wrong"


# Neighbours in the file are mistakes of a kind: a plain pytest tries every tenth.
@pytest.mark.parametrize("line", tiered(CASES, plain=list(CASES)[::10]), ids=str)  # long ones too
def test_message(line):
    told = _told(line)
    if os.environ.get("MESHLOOM_UPDATE"):
        CASES[line] = told + "\n\n"
        FILE.write_text("".join(f"$ {line}\n{text}" for line, text in CASES.items()))
    assert told == CASES[line].rstrip("\n")
    for problem in told.split("\nerror: "):
        assert "\n  fix: " in problem, "each problem says what to do"
    assert "Traceback" not in told
    assert not re.search(r"pydantic|omegaconf|hydra\.errors|TypeError", told)


def test_the_fix_of_a_message_works():
    """Where a message names values that work, they do."""
    told = 0
    for line in (line for line, text in CASES.items() if text.count("error: ") == 1):
        for fix in FIX.findall(CASES[line]):
            key = fix.split("=")[0]
            kept = [text for text in shlex.split(line) if not text.startswith(f"{key}=")]
            read_spec(Request((*kept, fix)), then=plan_and_check)
            told += 1
    assert told >= 4


def test_a_word_for_a_group_of_keys_is_put_into_the_keys_to_type():
    told = _told("adapter=lora adapter.base=nf4")
    assert told.startswith("error: adapter.base: 'nf4' is not a group of keys")
    assert "'adapter.base={element: nf4, block: ..., scales_block: ...}'" in told
