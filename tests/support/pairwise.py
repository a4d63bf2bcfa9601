"""Few combinations of several choices, in which each pair of values of two choices occurs."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]  # the value of each choice
Pair = frozenset[tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Returns all pairs of (choice, value) of a row, which need not have all choices."""
    return set(map(frozenset, combinations(row.items(), 2)))


def all_pairs(choices: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Returns every pair of values of different choices, in their order."""
    values = [[(name, value) for value in of_one] for name, of_one in choices.items()]
    return [frozenset(pair) for one, other in combinations(values, 2) for pair in product(one, other)]


def cover_pairs(choices: Mapping[str, Sequence[str]]) -> list[Row]:
    """Returns rows that have all pairs, the same ones each time.

    Greedy: each row begins with the first pair that is missing, and takes for each other choice the value that brings
    most missing pairs with what it has.
    """
    missing = dict.fromkeys(all_pairs(choices))
    rows: list[Row] = []
    while missing:
        row = dict(sorted(next(iter(missing)), key=lambda each: list(choices).index(each[0])))
        for name, of_one in choices.items():
            if name not in row:
                row[name] = max(of_one, key=lambda value: sum(p in missing for p in pairs_of(row | {name: value})))
        rows.append({name: row[name] for name in choices})
        missing = {pair: None for pair in missing if pair not in pairs_of(row)}
    return rows
