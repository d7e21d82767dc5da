"""A logits processor of vLLM with which some prompts end their server, for tests:

    vllm serve MODEL --logits-processors vllm_mortal:Mortal

With the byte model of `vllm_server.py` a prompt that contains `~~~` ends the engine's process, one with `|||` also the API
server, without a word.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

# Of the byte model, whose first tokens are the letters from `!` on.
_ENGINE, _SERVER = [ord("~") - ord("!")] * 3, [ord("|") - ord("!")] * 3


class Mortal(LogitsProcessor):
    """Changes no logits."""

    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Any) -> Any:
        return logits

    def update_state(self, batch_update: Any) -> None:
        for _, _, prompt, _ in batch_update.added if batch_update is not None else ():
            if _contains(prompt, _SERVER):
                os.kill(os.getppid(), signal.SIGKILL)
            if _contains(prompt, _SERVER) or _contains(prompt, _ENGINE):
                os._exit(1)


def _contains(prompt: list[int] | None, part: list[int]) -> bool:
    given = list(prompt or ())
    return any(given[at : at + len(part)] == part for at in range(len(given)))
