"""Long calls of C++, during which Python runs no signal handler, so that Ctrl-C would be heard minutes later."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def interruptibly(step: Callable[[], T]) -> T:
    """The result of the step, which runs in a thread; Ctrl-C is a KeyboardInterrupt here at once.

    The step runs on behind it, and would keep the process from ending in order: leave by `os._exit`.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(step())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result()
