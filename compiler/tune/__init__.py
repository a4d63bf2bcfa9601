"""The search for the best configuration: rules, then an analytic model of every candidate, then compiled schedules."""
