"""Hydra finds plugins by importing every module here, at each start of each Hydra app: they import nothing heavy."""
