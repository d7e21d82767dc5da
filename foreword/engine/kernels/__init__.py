"""Native kernels for CPUs: C++ source, compiled once on the machine that runs it (docs/decisions/0012)."""
