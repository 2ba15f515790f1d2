"""The tokens of a window to segments and words with times, without what was hallucinated in silence."""
