"""Words of commands in shell scripts, compared with what bash makes of them."""

import shutil
import subprocess

import pytest

from meshloom.compiler.peers.shell import COMPUTED, commands_of

SCRIPTS = {
    "variables": "A=1\nB='x y'\nshow $A \"$B\" $B '$A' \"a${A}b\"\n",
    "defaults": 'A=1\nshow ${A:-2} ${C:-3} "${D:-four five}" ${E-$A}\n',
    "arrays": 'ARGS=(--a 1 # one\n  --b "2 3"\n)\nARGS+=(--c)\nshow ${ARGS[@]}x "${ARGS[@]}"\n',
    "continued lines": 'show a \\\n  b "c \\\n d" \\\n  e # the rest\nshow f\n',
    "escapes": 'show a\\ b "\\$A" \'\\n\' "q\\"q"\n',
    "several on a line": "show a && show b; show c || true\n",
    "growing text": "A='x'\nA+=' y'\nshow \"$A\" $A\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name):
    bash = shutil.which("bash")
    assert bash
    text = 'show() { printf "<%s>" "$@"; echo; }\n' + SCRIPTS[name]
    expected = subprocess.run([bash, "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [command.words[1:] for command in commands_of(SCRIPTS[name]) if command.words[0] == "show"]
    assert ["".join(f"<{word}>" for word in words) for words in found if words] == expected[: len(found)]


def test_command_inside_of_a_word_has_the_variables_of_the_script():
    text = 'FLAGS="--xla_a=1 "\nARGS="x=1 \\\n  y=2"\n'
    text += "xpk create --command=\"export LIBTPU_INIT_ARGS='${FLAGS}' && run ${ARGS}\""
    *_, last = commands_of(text)
    assert last.words == ("run", "x=1", "y=2")
    assert last.environment["LIBTPU_INIT_ARGS"].split() == ["--xla_a=1"]


def test_only_exported_variables_reach_a_command():
    first, second = commands_of("A=1\nexport B=2\nrun\nC=3 run")
    assert first.environment == {"B": "2"}
    assert second.environment == {"B": "2", "C": "3"}


def test_what_a_shell_computes_is_never_guessed():
    (command,) = commands_of("N=$((2*OTHER))\nrun $(date +%s) $N $((2**3)) ${UNSET} $1")
    assert command.words == ("run", COMPUTED, COMPUTED, COMPUTED, "${UNSET}", "$1")


def test_whole_numbers_are_computed_as_a_shell_does():
    (command,) = commands_of("A=4\nB=$((A * 3))\nrun $(($A+${B})) $(( (B - 2) / 4 )) $((-7 / 2)) $((B % 5))-x")
    assert command.words == ("run", "16", "2", "-3", "2-x")


def test_defaults_that_are_set_and_words_of_set_variables():
    (_, command) = commands_of(': "${A:=4}"\nrun $A ${A:+n=$A} ${B:+never} ${C:-d} ${A:?is needed}')
    assert command.words == ("run", "4", "n=4", "d", "4")


def test_script_in_a_here_document_is_read():
    text = "X=$(cat <<EOM\npython train.py \\\n  --n 3\nEOM\n)\necho $X\n"
    assert ("python", "train.py", "--n", "3") in [command.words for command in commands_of(text)]
