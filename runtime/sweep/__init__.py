"""Prices, compiles or runs many declarations; each becomes a row of one table that survives crashes of its points."""
