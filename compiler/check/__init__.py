"""Checks that a declaration computes what one device computes: a small program like it, and what to compare it with.

shrink.py          cuts a declaration, with a reason for each cut, and keeps all that decides the program
small_model.py     cuts the numbers of a model
reference.py       the same step on one device in float32, without any of our step
compare.py         differences of trees of arrays, and how large rounding alone makes them
check_report.py    the lines of a check, typed

`runtime/check` runs the programs (docs/check.md).
"""
