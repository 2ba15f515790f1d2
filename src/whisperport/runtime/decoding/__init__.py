"""Decode windows: search, rules, fallback, segments and word timestamps."""
