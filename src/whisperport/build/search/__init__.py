"""Search for the targets and precisions that make a bundle fastest or smallest."""
