"""Sweeps: many declarations priced, compiled or run, each in a row of one table that survives what ends it."""
