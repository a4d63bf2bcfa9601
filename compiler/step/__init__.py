"""The train step, and the programs that generate text: pure functions made from the plan."""
