"""Scripts that engines run, as Jinja templates: values are quoted for the shell by who fills them in."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """Returns a template of this folder."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    loader = PackageLoader("meshloom.runtime.launch", "templates")
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
