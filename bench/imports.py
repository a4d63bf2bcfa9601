"""Public recipes of other trainers as overrides of Meshloom, by `meshloom import`.

    python bench/imports.py                      # imports every row again, says what changed, prints the table
    python bench/imports.py --record             # and keeps the overrides of today
    python bench/imports.py --add NAME ADDRESS TRAINER WORD...    # a row of a file or command on this machine

A row has the address of a recipe with its commit, the keys that it gives, and the XLA flags, as facts. Nothing is
fetched: a row is imported from its own keys. `overrides`: what came out, without the options of XLA; `problems`: or why
nothing did. `without_effect`: the number of its other keys, by what they are for.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from compiled_rows import markdown

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.peers.importing import TRAINERS, import_declaration
from meshloom.compiler.peers.reading import peer_of
from meshloom.compiler.peers.sources import find_declaration

KEPT = Path(__file__).with_suffix(".jsonl")
Row = dict[str, Any]


def read_rows() -> list[Row]:
    return [json.loads(line) for line in KEPT.read_text().splitlines()]


def words_of(row: Row) -> list[str]:
    """Returns the command of a row: its keys as its trainer's command line has them."""
    if row["peer"] == "maxtext":
        words = [f"{key}={_text(value)}" for key, value in row["keys"].items()]
        return [*words, f"compile_xla_flags={' '.join(row['flags'])}"] if row["flags"] else words
    return [f"--{key}={_text(value)}" for key, value in row["keys"].items()]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, bool)) or value is None else str(value)


def import_row(row: Row) -> tuple[list[str], list[str]]:
    """Returns the overrides of a row, or the problems."""
    try:
        words = import_declaration(row["peer"], words_of(row), row["target"], _no_file).words
        return [word for word in words if not word.startswith("compiler_options=")], []
    except ConfigError as error:
        return [], [f"{each.where.removeprefix('command: ')}: {each.what}" for each in error.problems]


def _no_file(place: str) -> str:
    raise AssertionError(f"a row reads {place}")


def make_row(name: str, address: str, peer: str, words: list[str], target: str | None) -> Row:
    """Returns a row of a declaration. Keys without effect are counted, and their values are left out."""
    trainer = TRAINERS[peer]
    given, launcher = find_declaration(trainer.form, words, lambda place: Path(place).read_text())
    given = trainer.launched(given, launcher)
    table = peer_of(peer)
    without = {key: what for what, keys in table.no_effect.items() for key in keys}
    keys = {key: value for key, value in given.values.items() if key not in without}
    flags = [*given.flags, *str(keys.pop("compile_xla_flags", "")).split()]
    left = Counter(without[key] for key in given.values if key in without)
    row = {"name": name, "source": address, "peer": peer, "target": target, "keys": keys, "flags": flags,
           "without_effect": dict(left)}  # fmt: skip
    overrides, problems = import_row(row)
    return row | {"overrides": overrides, "problems": problems}


def imported_table() -> str:
    rows = [row for row in read_rows() if row["overrides"]]
    return markdown(("recipe", "keys", "without effect", "XLA flags", "declared as"), map(_cells, rows))


def _cells(row: Row) -> list[str]:
    num_left = sum(row["without_effect"].values())
    shown = [word for word in row["overrides"] if not word.startswith("overlap.flag_presets")]
    counts = [str(len(row["keys"]) + num_left), str(num_left), str(len(row["flags"]) or "")]
    return [f"[{row['name']}]({row['source']})", *counts, f"`{shlex.join(shown)}`"]


def refused_table() -> str:
    rows = [row for row in read_rows() if row["problems"]]
    cells = ([f"[{row['name']}]({row['source']})", "; ".join(row["problems"])] for row in rows)
    return markdown(("recipe", "what is missing"), cells)


def left_table() -> str:
    """Returns how many keys of all recipes have no effect here, by what they are for."""
    found: Counter[tuple[str, str]] = Counter()
    for row in read_rows():
        found.update({(row["peer"], what): count for what, count in row["without_effect"].items()})
    return markdown(
        ("trainer", "keys without effect", "in all recipes"), ([*key, str(n)] for key, n in found.most_common())
    )


def read_keys_table() -> str:
    """Returns the keys that recipes give and that are read, by the number of recipes."""
    found = Counter((row["peer"], key) for row in read_rows() for key in row["keys"])
    rows = []
    for peer in TRAINERS:
        named = [f"{key} {n}" for (of, key), n in found.most_common() if of == peer]
        rows.append([peer, str(sum(row["peer"] == peer for row in read_rows())), ", ".join(named)])
    return markdown(("trainer", "recipes", "keys that are read, with the number of recipes that give them"), rows)


def main() -> int:
    """Returns 1 if a row changed, and is not recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--target")
    parser.add_argument("--add", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    rows = read_rows() if KEPT.exists() else []
    if given.add:
        name, address, peer, *words = given.add
        row = make_row(name, address, peer, words, given.target)
        rows = [each for each in rows if each["name"] != name] + [row]
    changed = 0
    for row in rows:
        now = import_row(row)
        if now != (row["overrides"], row["problems"]):
            changed += 1
            print(f"changed: {row['name']}: {now}", file=sys.stderr)
            if given.record:
                row["overrides"], row["problems"] = now
    if given.record or given.add:
        KEPT.write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_imported = sum(bool(row["overrides"]) for row in rows)
    print(f"{num_imported} of {len(rows)} recipes are imported.\n")
    print(imported_table(), refused_table(), read_keys_table(), left_table(), sep="\n\n")
    return int(changed > 0 and not given.record)


if __name__ == "__main__":
    sys.exit(main())
