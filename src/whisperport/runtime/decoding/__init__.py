"""Decode windows: search, rules, and fallback to higher temperatures."""
