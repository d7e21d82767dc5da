"""How long tests, and the scripts that they start, wait for what a vLLM or a thread does.

No test asserts a time, so a larger limit costs nothing where all is well. The limit of a test as a whole is above it.
"""

WITHIN = 300.0  # seconds
