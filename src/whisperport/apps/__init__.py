"""The command line, the server, archives and benchmarks: what people start."""
