"""Generates candidates for a better configuration, and chooses the best one."""
