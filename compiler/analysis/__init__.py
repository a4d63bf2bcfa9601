"""What a compiled program does, joined with its plan: exposed communication, memory, findings."""
