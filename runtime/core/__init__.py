"""Vocabulary that every part of the runtime shares: exit codes, files, locks, manifests, interrupts, stderr."""
