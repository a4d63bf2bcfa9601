"""Runs cells in the kernel of a notebook, a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


def run_cells(cells: Sequence[str], folder: Path) -> list[list[NotebookNode]]:
    """Returns the outputs of each cell. An exception in one is an output of it, and the next cell runs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells]
