"""The run directory: its place, its record, and the declaration, report and profile in it."""
