"""Runs `meshloom check`: compiles the small programs of a declaration, runs them, and compares (docs/check.md).

check_data.py      documents whose ends are known by their tokens, in sequences as the declared data are packed
programs.py        the small programs on simulated devices, compiled without optimisation, several at once
runs.py            two steps of the small program, of one device, and of programs with one thing otherwise
check.py           one line for each property
check_files.py     what is saved and exported: checkpoints, a resumed run, published folders
"""
