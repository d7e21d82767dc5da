"""Reports of a replica in its `/metrics`: number of requests, block size, capacity, memory usage and weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(
    r"^(vllm:(?:num_requests_running|num_requests_waiting|cache_config_info|kv_cache_usage_perc)"
    r"|foreword:model_info|vllm:foreword_model_info|process_start_time_seconds)(\{.*\})?\s+(\S+)$",
    re.MULTILINE,
)
# Metrics of Foreword's servers, and of vLLM servers with Foreword's connector.
_MODEL_INFO: Final = ("foreword:model_info", "vllm:foreword_model_info")
_CONNECTOR: Final = "vllm:foreword_"
# Lines of a Foreword server about its KV memory, which the dashboard parses; of one replica at most `_MOST_LINES`.
_MEMORY: Final = re.compile(
    r"^foreword:(?:blocks(?:_free|_cached|_pinned)?|tier_(?:bytes|budget_bytes|blocks|pinned_bytes|open))[{ ].{0,1000}$",
    re.MULTILINE,
)
_MOST_LINES: Final = 256
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """Values of a replica's metrics; None if it does not report them.

    Attributes:
        requests: requests that run or wait there, from any client.
        capacity_tokens: capacity of its KV memory.
        usage: share of its blocks in use by requests.
        memory: lines about its blocks and tiers.
        fingerprint: of its weights.
        has_connector: it is a vLLM server with Foreword's connector, which publishes the fingerprint with its first step.
        started: when its process started, in seconds since 1970.
    """

    requests: int | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    usage: float | None = None
    memory: tuple[str, ...] = ()
    fingerprint: str | None = None
    has_connector: bool = False
    started: float | None = None


UNKNOWN: Final = ReplicaMetrics()


def parse_metrics(text: str) -> ReplicaMetrics:
    """Parse a server's `/metrics`. Numbers of several engines are added up; `usage` is their mean."""
    values: dict[str, float] = {}
    # By engine: a data-parallel vLLM server has several.
    configs: dict[str, dict[str, str]] = {}
    usages: list[float] = []
    fingerprints: set[str] = set()
    for name, given, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        labels = dict(LABEL.findall(given))
        if name == "vllm:cache_config_info":
            configs.setdefault(labels.get("engine", ""), labels)
        elif name in _MODEL_INFO:
            # The series of weights that were replaced in place is 0.
            fingerprints |= {labels.get("fingerprint", "")} if value == 1 else set()
        elif name == "vllm:kv_cache_usage_perc":
            usages += [value] if math.isfinite(value) else []
        elif math.isfinite(value):
            values[name] = value + (values.get(name, 0.0) if name.startswith("vllm:") else 0.0)
    requests = [values[name] for name in ("vllm:num_requests_running", "vllm:num_requests_waiting") if name in values]
    sizes, blocks = ([_number(one.get(name)) for one in configs.values()] for name in ("block_size", "num_gpu_blocks"))
    size = next(filter(None, sizes), None)
    return ReplicaMetrics(
        int(sum(requests)) if requests else None,
        size,
        size * sum(one or 0 for one in blocks) if size is not None and any(blocks) else None,
        sum(usages) / len(usages) if usages else None,
        tuple(_MEMORY.findall(text)[:_MOST_LINES]),
        # Engines with different weights are one replica, and nothing is the same as that.
        next(iter(fingerprints)) or None if len(fingerprints) == 1 else None,
        _CONNECTOR in text,
        values.get("process_start_time_seconds"),
    )


def _number(text: str | None) -> int | None:
    found = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0
    return found or None
