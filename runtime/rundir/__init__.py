"""The run directory: its place, its room on disk, and the declaration and report in it."""
