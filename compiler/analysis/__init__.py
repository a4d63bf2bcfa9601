"""Reads what a compiled program does, by itself or joined with its plan: exposed communication, memory, findings."""
