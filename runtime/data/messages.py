"""Checks the messages of a chat, and reads what they say about themselves: which are to be learnt, what is JSON."""

import json
from collections.abc import Mapping
from typing import Any

from meshloom.compiler.core.errors import use_one_of

from .chat_template import MODEL, SWITCHES, ChatError, JsonObject, Messages

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
CALLS = ("tool_calls", "function_call")  # of a message: what the model calls, with arguments
WRITE = "write one JSON object per line, with messages, or with prompt and completion"


def check_messages(value: Any, key: str) -> Messages:
    """Returns messages that have roles, with calls of tools as objects. Raises ChatError."""
    if not isinstance(value, list):
        raise ChatError(f"'{key}' is {type(value).__name__}, not a list of messages", WRITE)
    if not value:
        raise ChatError(f"'{key}' has no messages", "write the messages of a chat, or leave the line out")
    return [_checked(message, f"message {number} of '{key}'") for number, message in enumerate(value)]


def _checked(message: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise ChatError(f"{name} is {type(message).__name__}, not an object", "write {role: ..., content: ...}")
    role = message.get("role")
    if role not in ROLES:
        what = f"{name} has the role '{role}'" if "role" in message else f"{name} has no 'role'"
        raise ChatError(what, use_one_of(role, ROLES))
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise ChatError(f"{name} has content that is {type(content).__name__}", "write text, or a list of parts")
    if content is None and set(message) <= {"role", "content"}:
        raise ChatError(f"{name} has no 'content'", "write its text under 'content'")
    for switch in SWITCHES:
        if (said := message.get(switch)) is None:
            continue
        if said not in (0, 1):
            raise ChatError(f"{name} has {switch}: {json.dumps(said)}", f"write {switch}: 0 or 1")
        if said and role != MODEL:
            fix = f"leave {switch} out: only what the {MODEL} says is learnt"
            raise ChatError(f"{name} has {switch}: {json.dumps(said)}, and is of the role '{role}'", fix)
    calls = {key: parsed_json(message[key], f"'{key}' of {name}") for key in CALLS if message.get(key)}
    return {**message, **{key: _with_arguments(value, f"'{key}' of {name}") for key, value in calls.items()}}


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Returns False for a message that says that it is not to be learnt."""
    return all(message.get(switch) in (None, 1) for switch in SWITCHES)


def parsed_json(value: Any, name: str) -> Any:
    """Returns the value of a text in JSON, and any other value as it is. Raises ChatError for text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{name} is text that is not JSON: {error}", "write an object, or its text in JSON") from error


def _with_arguments(value: Any, name: str) -> Any:
    """Returns calls whose arguments are objects that a template may also write as they are."""
    if isinstance(value, list):
        return [_with_arguments(parsed_json(each, name), name) for each in value]
    if not isinstance(value, dict):
        raise ChatError(f"{name} is {type(value).__name__}, not an object", "write {name: ..., arguments: {...}}")
    if "function" in value:
        return {**value, "function": _with_arguments(value["function"], name)}
    if (given := value.get("arguments")) is None:
        return value
    arguments = parsed_json(given or "{}", f"'arguments' in {name}")
    if not isinstance(arguments, dict):
        what = f"'arguments' in {name} is {type(arguments).__name__}, not an object"
        raise ChatError(what, "write {key: value}, or its text in JSON")
    text = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
    return {**value, "arguments": JsonObject(arguments, text)}
