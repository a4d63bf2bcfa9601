"""Lowering, ahead-of-time compilation, and parsing of what XLA scheduled. It knows no report."""
