"""Checks what a wheel for aarch64 has where there is no compiler: its kernels, and the embedded model with a hit."""

import platform

from foreword import LLM, SamplingParams, compiled_code
from foreword.engine.kernels import native

assert platform.machine() == "aarch64"
assert compiled_code.library().parent.name == compiled_code.SHIPPED_FOLDER and native.load().lanes == 4
# It compares itself with the model's own forward pass at start.
llm = LLM(kv_memory="4096 tokens", threads=1, kernels="native")
[output] = llm.generate("import os\n" * 40, SamplingParams(max_tokens=8, temperature=0.0))
[again] = llm.generate("import os\n" * 40, SamplingParams(max_tokens=8, temperature=0.0))
assert again.cached_tokens > output.cached_tokens == 0
llm.check()
print("the embedded model computes on", platform.machine())
