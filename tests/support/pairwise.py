"""Few combinations of several choices, in which each pair of values of two choices occurs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]  # the value of each choice
Pair = frozenset[tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Returns all pairs of (choice, value) of a row, which need not have all choices."""
    return set(map(frozenset, combinations(row.items(), 2)))


def all_pairs(choices: Mapping[str, Sequence[str]], fits: Callable[[Row], bool] = lambda _: True) -> list[Pair]:
    """Returns every pair of values of different choices that fit each other, in their order."""
    values = [[(name, value) for value in of_one] for name, of_one in choices.items()]
    pairs = [pair for one, other in combinations(values, 2) for pair in product(one, other)]
    return [frozenset(pair) for pair in pairs if fits(dict(pair))]


def cover_pairs(choices: Mapping[str, Sequence[str]], fits: Callable[[Row], bool] = lambda _: True) -> list[Row]:
    """Returns rows that have all pairs, the same ones each time.

    Greedy: each row begins with the first pair that is missing, and takes for each other choice the value that brings
    most missing pairs with what it has. fits: whether the values of a row, which need not have all choices, work with
    each other; some value of each choice has to work with every part of a row.
    """
    missing = dict.fromkeys(all_pairs(choices, fits))
    rows: list[Row] = []
    while missing:
        row = dict(sorted(next(iter(missing)), key=lambda each: list(choices).index(each[0])))
        for name, of_one in choices.items():
            if name not in row:
                fitting = [value for value in of_one if fits(row | {name: value})]
                row[name] = max(fitting, key=lambda value: sum(p in missing for p in pairs_of(row | {name: value})))
        rows.append({name: row[name] for name in choices})
        missing = {pair: None for pair in missing if pair not in pairs_of(row)}
    return rows


def cover_values(rows: Mapping[str, Row], times: int = 1) -> list[str]:
    """Returns the names of few rows in which each value of each choice occurs, the same ones each time.

    times: how many such covers without a common row, one after the other, as far as there are rows for them.
    """
    names: list[str] = []
    for _ in range(times):
        left = {name: row for name, row in rows.items() if name not in names}
        missing = {pair for row in left.values() for pair in row.items()}
        while missing:
            names.append(max(left, key=lambda name: len(missing & left[name].items())))
            missing -= left[names[-1]].items()
    return names
