"""What a command does not use is not imported: a process imports more than half of its time until it answers."""

import subprocess
import sys

import pytest

COMPUTING = ("jax", "flax", "optax")
RUNNING = ("orbax", "grain", "tensorboardX", "jinja2", "scipy", "jax.experimental.pallas")

# Each line is run by the same process; what one imports stays for the next.
LINES = """
import sys
from meshloom.runtime.cli.main import run

def found(names, *line):
    code = run(list(line))
    loaded = [name for name in names if name in sys.modules]
    print(code, *line, "imports", *loaded, file=sys.stderr)

found({nothing}, "--help")
found({computing} + {running}, "runs", ".")
found({computing} + {running}, "train", "--help")
found({computing} + {running}, "explain", "target=v5q-8")
found({running}, "explain", "target=cpu-8")
found(("grain", "orbax"), "compile", "target=cpu-8", "batch_size=7")
found(("jax",), "explain", "target=cpu-8")
"""


@pytest.mark.ci
def test_a_command_imports_no_library_that_it_does_not_use(tmp_path):
    program = LINES.format(nothing=(*COMPUTING, "hydra", "rich", "pydantic"), computing=COMPUTING, running=RUNNING)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if " imports" in line]
    assert said == [
        "0 --help imports",
        "0 runs . imports",
        "0 train --help imports",
        "2 explain target=v5q-8 imports",
        "0 explain target=cpu-8 imports",
        "2 compile target=cpu-8 batch_size=7 imports",
        "0 explain target=cpu-8 imports jax",  # it would be found
    ], done.stderr
