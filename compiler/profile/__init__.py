"""Reads a trace of what ran, and compares it with what its program was predicted to do."""
