"""Hypothesis for all tests: examples from a fixed seed, and no deadlines.

The same commit gives the same examples everywhere, so a red run can be had again; `HYPOTHESIS_PROFILE=explore make test`
draws more and new ones. No test asserts a time, hypothesis' deadlines included: a loaded machine is not a defect.
"""

import os

# The CUDA kernels run in Triton's interpreter. Triton reads this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

settings.register_profile("foreword", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "foreword"))
