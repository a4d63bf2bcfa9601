"""Renders a report for people and tools: a terminal summary, a timeline for Perfetto, one page of HTML.

All of it is rendered to values and text here; runtime/rundir/run_dir.py writes the files.
"""
