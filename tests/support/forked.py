"""Starts commands under test in processes that are forked from one in which everything is imported.

Python needs four seconds to import what a command uses; a fork of a process that has done so takes a few hundredths of
one. A server imports, starts neither threads of Python nor JAX's backends, and forks for each request. The forked
process gets the arguments, directory, environment and files of the request, and runs as the program of a fresh Python:
its exit code, signals, output and exit handlers are real. Two things differ from a fresh one. Processes of one server
have the same hash seed, and nothing is read from the environment while libraries are imported: where a variable that
is read then differs from the server's, a fresh process is started instead. Tests of the start itself, such as of what
is imported or found on PYTHONPATH, start a fresh Python by `subprocess`.
"""

import atexit
import gc
import json
import os
import pkgutil
import re
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

# Variables that Python and libraries read when they start or are imported, besides those of jax.config.
READ_AT_IMPORT = re.compile(r"(PYTHON|LANG|LC_|LD_|TZ$|OMP_|OPENBLAS_|TF_CPP_|GRPC_)")
NOT_IMPORTED = {"__main__", "harness_model", "mlflow_tracker", "weights_and_biases"}  # of large extras
ENVIRONMENT = dict(os.environ)  # the server's
SET_BY_PYTHON = {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}  # when it starts, whatever a process inherits
STARTED, ENDED = struct.Struct("i"), struct.Struct("id")  # what the server answers: a pid; an exit code and seconds
seconds = 0.0  # processor time of all forked processes that were waited for, which os.times() of this process lacks


class Forked:
    """A forked process, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path | None,
        env: dict[str, str],
        stdout: int | IO[Any] | None,
        stderr: int | IO[Any] | None,
        start_new_session: bool,
    ):
        self.args = words
        self.returncode: int | Any = None
        self.stdout, theirs_out = _output(stdout, 1, 1)
        self.stderr, theirs_err = _output(stderr, 2, theirs_out)
        self._said: dict[IO[str], str] = {}
        self._readers: list[threading.Thread] = []
        self._answers, theirs = socket.socketpair()
        with theirs, open(os.devnull) as nothing:
            descriptors = [theirs.fileno(), nothing.fileno(), theirs_out, theirs_err]
            with suppress(BrokenPipeError):  # no answer says so
                socket.send_fds(_server()[1], [b"."], descriptors)
        for descriptor, given in ((theirs_out, stdout), (theirs_err, stderr)):
            if given in (subprocess.PIPE, subprocess.DEVNULL):
                os.close(descriptor)
        (self.pid,) = STARTED.unpack(self._receive(STARTED))
        request = {"words": words, "cwd": str(cwd or Path.cwd()), "env": env, "own session": start_new_session,
                   "ignored signals": [*_ignored_signals()]}  # fmt: skip
        self._answers.sendall(json.dumps(request).encode())
        self._answers.shutdown(socket.SHUT_WR)

    def _receive(self, answer: struct.Struct) -> bytes:
        received = self._answers.recv(answer.size, socket.MSG_WAITALL)
        if len(received) < answer.size:
            self._answers.close()
            said = _server()[0].stdout
            raise RuntimeError(f"the server of forked processes has ended: {said.read() if said else ''}")
        return received

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit code: -9 after SIGKILL."""
        global seconds
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            self.returncode, used = ENDED.unpack(self._receive(ENDED))
            seconds += used
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end, and returns what was written to pipes since the last read."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            streams = [stream for stream in (self.stdout, self.stderr) if stream and not stream.closed]
            self._readers = [threading.Thread(target=self._read, args=[stream], daemon=True) for stream in streams]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(deadline and max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        self.wait(deadline and max(0.0, deadline - time.monotonic()))
        out, err = (self._said.get(stream, "") if stream else "" for stream in (self.stdout, self.stderr))
        return out, err

    def _read(self, stream: IO[str]) -> None:
        with stream:
            self._said[stream] = stream.read()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait()


Process = Forked | subprocess.Popen[str]


def start(
    words: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = subprocess.PIPE,
    stderr: int | IO[Any] | None = subprocess.PIPE,
    start_new_session: bool = False,
    is_forked: bool = True,
) -> Process:
    """Starts `python WORDS`, such as `-m meshloom train` or `-c CODE`, with pipes unless files are given."""
    environment = dict(os.environ if env is None else env)
    if is_forked and sys.platform == "linux" and not read_at_import(environment):
        return Forked(words, cwd, environment, stdout, stderr, start_new_session)
    return subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        text=True, start_new_session=start_new_session,
    )  # fmt: skip


def read_at_import(environment: Mapping[str, str]) -> set[str]:
    """Returns the variables that are read at import and differ from those of the server."""
    import jax  # noqa: PLC0415 (the server starts without it)

    differ = {name for name, _ in {*environment.items()} ^ {*ENVIRONMENT.items()}}
    return {name for name in differ if READ_AT_IMPORT.match(name) or name.lower() in jax.config.values}


def _output(given: int | IO[Any] | None, inherited: int, stdout: int) -> tuple[IO[str] | None, int]:
    """Returns the end of a pipe to read from, if one is asked for, and the descriptor to write to."""
    if given == subprocess.PIPE:
        ours, theirs = os.pipe()
        return open(ours), theirs
    if given == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    if given == subprocess.STDOUT:
        return None, stdout
    return None, given.fileno() if given is not None and not isinstance(given, int) else given or inherited


def _ignored_signals() -> set[int]:
    """Returns the signals that this process ignores, also those of which Python does not know that a library did it."""
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    return {number for number in signal.valid_signals() if int(mask, base=16) >> (number - 1) & 1}


@cache
def _server() -> tuple[subprocess.Popen[str], socket.socket]:
    """Starts the server of this process. Returns the socket that takes requests, too; when it is closed, the server
    ends. Pipes are its output, as of most processes that are forked from it: Python looks at a file when it opens it.
    """
    requests, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], env=ENVIRONMENT, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def end() -> None:
        requests.close()
        with process:
            pass

    atexit.register(end)
    return process, requests


# The server, and what is forked from it.


def serve(requests: socket.socket) -> socket.socket:
    """Forks a process for each request, and tells who asked how it ended. Returns in each of them its own request;
    ends this process when nobody is left to ask."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    pid, asked = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status, used = os.wait4(pid, 0)
                    _answer(asked, ENDED.pack(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))
                    asked.close()
                    continue
                message, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
                if not message:
                    sys.exit()
                asked = socket.socket(fileno=descriptors.pop(0))
                pid = os.fork()
                if pid == 0:
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    for descriptor, (_, other) in running.items():
                        os.close(descriptor)
                        other.close()
                    requests.close()
                    return asked
                for descriptor in descriptors:
                    os.close(descriptor)
                _answer(asked, STARTED.pack(pid))
                descriptor = os.pidfd_open(pid)
                running[descriptor] = pid, asked
                selector.register(descriptor, selectors.EVENT_READ)


def _answer(asked: socket.socket, answer: bytes) -> None:
    with suppress(BrokenPipeError):  # who asked is gone, or waits for no answer
        asked.sendall(answer)


def become(asked: socket.socket) -> None:
    """Makes this process what the request asks for, as if Python had just been started with its words."""
    with asked, asked.makefile() as file:
        request = json.load(file)
    if request["own session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # A fresh process inherits which signals are ignored by whoever asks. They may have changed since the server began:
    # libtpu has its process ignore SIGHUP.
    for number in (_ignored_signals() ^ {*request["ignored signals"]}) - SET_BY_PYTHON:
        signal.signal(number, signal.SIG_IGN if number in request["ignored signals"] else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # pyright: ignore[reportAttributeAccessIssue]
    import_module("numpy").random.seed()  # Python's own random numbers are seeded by the fork
    flag, program, *arguments = request["words"]
    sys.argv = [flag, *arguments]
    if flag == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif flag == "-c":
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    else:
        raise ValueError(f"cannot run python {flag}")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C ends whoever asks, which ends this
    del sys.path[0]  # the folder of this file
    for module in pkgutil.walk_packages(import_module("meshloom").__path__, "meshloom."):
        if module.name.rpartition(".")[2] not in NOT_IMPORTED:
            import_module(module.name)
    if len(threading.enumerate()) > 1 or import_module("jax._src.xla_bridge").backends_are_initialized():
        sys.exit(f"an import started threads or JAX's backends: {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # else each process would look through all of this again, and so copy it
    become(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
