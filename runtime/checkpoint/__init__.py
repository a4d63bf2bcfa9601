"""Saving the train state and finding where a run resumes."""
