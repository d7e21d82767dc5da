"""How long tests, and the scripts that they start, wait for what a vLLM or a thread does.

No test asserts a time, so a larger limit costs nothing where all is well. A test that waits so long is marked with a larger
limit as a whole.
"""

WITHIN = 300.0  # seconds
