"""The command line of a run that another process or another host starts."""

from collections.abc import Sequence

from meshloom.compiler.config.allowed_code import FLAG
from meshloom.compiler.config.compose import Request


def words_of_train(request: Request, allowed: Sequence[str], *more: str) -> list[str]:
    """Returns the words after `meshloom train`. allowed: modules whose code it may run. more: overrides after those of
    the request."""
    words = [f"{FLAG}={','.join(allowed)}"] if allowed else []
    words += ["--config-name", request.config_name] if request.config_name != "config" else []
    words += ["--config-path", request.config_path] if request.config_path else []
    return [*words, *request.overrides, *more]
