"""What the verbs of the command line do: check, fix, lower, inspect, plan and others."""
