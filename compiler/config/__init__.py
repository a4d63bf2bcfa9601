"""Hydra overrides to a validated RunSpec, with every mistake found and a fix for each."""
