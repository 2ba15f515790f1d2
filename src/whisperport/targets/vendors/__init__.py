"""Chips: one folder per vendor."""
