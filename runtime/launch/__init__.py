"""Starts a run on every host of a target by existing engines, and says when they are to restart it."""
