"""Run the programs of a bundle: caches, batches and the state of one call."""
