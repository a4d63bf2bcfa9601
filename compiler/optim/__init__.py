"""Optimizers and learning-rate schedules: typed configs that build optax transformations."""
