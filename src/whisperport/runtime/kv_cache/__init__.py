"""The state of one call: the caches of keys and values, of one text or of a batch, and steps in them."""
