"""Schedules of pipelines as data: tables of ticks and stages."""
