"""The hardware: chips, the mesh on their torus, the cost of each link, and what its compiler can do."""
