"""Checks what an installed wheel has where there is no compiler: the pages, the kernels, and the embedded model with a hit."""

import platform
from pathlib import Path

import foreword
from foreword import LLM, SamplingParams, compiled_code
from foreword.dashboard import pages

assert "site-packages" in foreword.__file__, foreword.__file__

assert pages.PAGE in pages.files()
if platform.machine() == "x86_64" and "avx2" in compiled_code.processor_flags():
    assert compiled_code.library().parent == Path(compiled_code.__file__).parent / compiled_code.SHIPPED_FOLDER
llm = LLM(kv_memory="4096 tokens", threads=1)
[output] = llm.generate("import os\n" * 40, SamplingParams(max_tokens=8, temperature=0.0))
[again] = llm.generate("import os\n" * 40, SamplingParams(max_tokens=8, temperature=0.0))
assert again.cached_tokens > output.cached_tokens == 0
llm.check()
