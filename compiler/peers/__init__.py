"""Reads the declarations of other trainers: their files and commands to overrides of Meshloom, key by key."""
