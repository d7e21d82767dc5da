"""Native kernels for CPUs: C++ source, compiled once on the machine that runs it (dev/decisions/0012)."""
