"""Native kernels for CPUs: C++ that ships as source and is compiled once on the machine that runs it (docs/decisions/0012)."""
