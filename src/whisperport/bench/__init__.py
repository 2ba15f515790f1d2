"""Measure: what, on what machine, how to repeat."""
