"""The train step: a pure function made from the plan."""
