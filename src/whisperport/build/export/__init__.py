"""Export a checkpoint as a verified bundle: place, trace, lower, verify and write its programs."""
