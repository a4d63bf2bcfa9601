"""Compiling a plan for its devices, or loading what was compiled before."""
