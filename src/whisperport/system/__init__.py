"""The operating system: atomic writes, locks, child processes, memory, interrupts and files."""
