"""Candidates for a better configuration, and which one is best."""
