"""Reports and plans for people and tools: JSON, terminal, HTML, and differences between runs."""
