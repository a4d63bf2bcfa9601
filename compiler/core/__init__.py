"""Vocabulary that every other folder shares: errors, trees, key paths, units, and text that is safe on a terminal."""
