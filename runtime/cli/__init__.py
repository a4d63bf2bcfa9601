"""Runs the `meshloom` command: its subcommands, flags, help and completion."""
