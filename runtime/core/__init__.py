"""Vocabulary that every part of the runtime shares: exit codes, atomic files, locks, manifests, interrupts, stderr."""
