"""How each operation runs over the mesh: its strategies, costs and code; a folder each for attention and experts."""
