"""A pairwise cover: few rows in which any two levels of any two factors meet."""

from collections.abc import Iterator, Mapping
from itertools import combinations, product

Row = dict[str, str]  # a level of each factor
Pair = frozenset[tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Returns all pairs of (factor, level) of a row, which need not have all factors."""
    return set(map(frozenset, combinations(row.items(), 2)))


def all_pairs(factors: Mapping[str, tuple[str, ...]]) -> set[Pair]:
    """Returns every pair of levels of different factors."""
    return {
        frozenset([(f, x), (g, y)])
        for f, g in combinations(factors, 2)
        for x, y in product(factors[f], factors[g])
    }  # fmt: skip


def pairwise(factors: Mapping[str, tuple[str, ...]]) -> list[Row]:
    """Returns rows that cover every pair, always the same ones.

    Each begins with a pair that no row has; every other factor then takes the level that adds most new pairs. The two
    largest factors begin, since every pair of theirs needs a row of its own.
    """
    order = sorted(factors, key=lambda factor: -len(factors[factor]))
    missing, rows = all_pairs(factors), []
    for start in _starts(order, factors):
        if frozenset(start.items()) not in missing:
            continue
        row = dict(start)
        for factor in order:
            if factor not in row:
                gains = {level: len(pairs_of(row | {factor: level}) & missing) for level in factors[factor]}
                row[factor] = max(gains, key=lambda level: gains[level])
        missing -= pairs_of(row)
        rows.append({factor: row[factor] for factor in factors})
    return rows


def _starts(order: list[str], factors: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    for f, g in combinations(order, 2):
        for x, y in product(factors[f], factors[g]):
            yield {f: x, g: y}
