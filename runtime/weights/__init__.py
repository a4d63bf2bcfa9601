"""Weights alone: read from published folders and from other runs, and written as folders that others read."""
