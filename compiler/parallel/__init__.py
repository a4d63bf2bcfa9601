"""How each operation runs over the mesh: one file per operation, with its strategies, their costs and their code."""
