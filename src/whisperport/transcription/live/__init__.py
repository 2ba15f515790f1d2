"""Audio to text while it arrives."""
