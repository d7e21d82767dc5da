"""Runs in an environment with vLLM: files and functions of the package that a KV block passes, as JSON.

python vllm_path_script.py '{"model": DIR, "folder": DIR}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm_case

from benchmarks.vllm.block_path import trace


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    vllm_case.finish({"found": trace(job["model"], job["folder"])})


if __name__ == "__main__":
    main()
