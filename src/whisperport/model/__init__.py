"""What needs torch: checkpoints, the network, traces, rewrites, and what files contain."""
