"""From a checkpoint or a program to files that a target runs: calibrate, export, compile, search."""
