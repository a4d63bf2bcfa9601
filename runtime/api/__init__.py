"""The Python interface: what `import meshloom` gives, for notebooks, tests and programs of one's own."""
