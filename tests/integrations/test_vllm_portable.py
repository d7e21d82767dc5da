"""The portable layout under vLLM: its packings, and instances with other block sizes and ranks over one store."""

from __future__ import annotations

from vllm_process import needs_vllm, run

pytestmark = needs_vllm


def test_packings_of_the_cpu_backend() -> None:
    """What vLLM's CPU kernels write for one instruction set and block size, and Foreword loads for another, has the bytes that
    they write there themselves."""
    job = {
        "packings": ["vec", "vec16", "amx"],
        "dtypes": ["float32", "bfloat16", "float16"],
        "block_sizes": [32, 64, 128],
        "head_sizes": [32, 64, 80, 96, 112, 128, 256],
    }
    found = run("vllm_packing_script.py", job)
    assert found["different"] == []
    assert found["moves"] >= 1512  # without AMX; more with it
