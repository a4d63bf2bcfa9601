"""Renders the texts that engines get: scripts from Jinja templates, and manifests as YAML.

Whoever fills in a template quotes its values for the shell.
"""

from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """Returns a template of this folder."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    loader = PackageLoader("meshloom.runtime.launch", "templates")
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return made


def filled(name: str, **values: Any) -> dict[str, Any]:
    """Returns a YAML template filled in, without what is empty."""
    return _without_empty(yaml.safe_load(template(name).render(**values)))


def _without_empty(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_empty(each) for each in node]
    if isinstance(node, str):  # JSON writes a character beyond U+FFFF as two halves, which YAML does not join
        return node.encode("utf-16", "surrogatepass").decode("utf-16")
    if not isinstance(node, dict):
        return node
    kept = {key: _without_empty(value) for key, value in node.items()}
    return {key: value for key, value in kept.items() if value not in (None, {}, [])}


class _Dumper(yaml.SafeDumper):
    """Writes YAML as a person would: scripts as blocks, nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(value: Any) -> str:
    """Returns the value as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)
