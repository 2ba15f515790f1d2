"""Run the programs of a bundle, which holds no state, and read the logits."""
