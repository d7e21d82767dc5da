"""Runs in an environment with vLLM: the `vllm` command, imported before; its own processes are forked too."""

from __future__ import annotations

import multiprocessing
import sys

import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    # vLLM's CPU build would start the processes of engine and worker anew, and each imports everything again.
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv[0] = "vllm"
    main()
