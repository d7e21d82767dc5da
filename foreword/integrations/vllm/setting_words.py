"""What an operator sets to change an attribute that keeps servers from sharing KV, for the log."""

from __future__ import annotations

import re
from typing import Final

from foreword.integrations.vllm.namespace import CODE, LAID_OUT

# By the begin of what `Observations.difference` says.
_SET_BY: Final = {
    f"{LAID_OUT}: KV cache groups": "--disable-hybrid-kv-cache-manager",
    f"{LAID_OUT}: tokens of a block": "--block-size",
    f"{LAID_OUT}: ranks": "--tensor-parallel-size, --pipeline-parallel-size",
    f"{LAID_OUT}: dtype": "--kv-cache-dtype, --dtype",
    "dtype ": "--dtype",
    "quantization": "--quantization",
    "batch_invariant ": "VLLM_BATCH_INVARIANT",
    "draft.": "--speculative-config",
    CODE: "the version or a plug-in of vLLM",
    "code ": "the checkpoint's own code",
    "config.": "config.json, --hf-overrides",
    "text.": "config.json, --hf-overrides",
}
_KV_DTYPE: Final = re.compile(r"\S+\.kv_cache_dtype is ")


def set_by(difference: str) -> str:
    """The flag, variable or file that sets what differs, in brackets; "" if that is not known."""
    found = next((setting for begin, setting in _SET_BY.items() if difference.startswith(begin)), "")
    if not found and _KV_DTYPE.match(difference):
        found = "--kv-cache-dtype, --dtype"
    return f" ({found})" if found else ""
