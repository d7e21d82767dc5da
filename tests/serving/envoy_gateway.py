"""A real Envoy with the configurations of docs/guides/gateway.md, as the benchmark runs it, without short time limits."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

from ports import free_port

_spec = importlib.util.spec_from_file_location(
    "envoy_process", Path(__file__).parents[2] / "benchmarks" / "router" / "envoy_process.py"
)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["envoy_process"] = _module
_spec.loader.exec_module(_module)

_module.free_port = free_port
Envoy = partial(_module.Envoy, patient=True)
envoy_program = _module.envoy_program
