"""Saving the train state, and finding finished checkpoints."""
