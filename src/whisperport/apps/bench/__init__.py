"""Measure how long transcribing takes, how much memory it needs, and how accurate it is."""
