"""The report of a hit whose KV was wrong: what `foreword audit` shows and computes again."""

from __future__ import annotations

import json
import logging
import os
import time
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword import __version__
from foreword.blocks.keys import token_bytes
from foreword.engine.hit_audit import HitAudit
from foreword.prefixes.mismatch import Mismatch
from foreword.prefixes.quarantine import ChainQuarantine

if TYPE_CHECKING:
    from foreword.blocks.prefix_cache import PrefixCache
    from foreword.engine.external_kv import EngineStores
    from foreword.engine.torch_runner import TorchRunner
    from foreword.engine_config import EngineConfig

log = logging.getLogger(__name__)

FORMAT = 1


def build_audit(
    config: EngineConfig,
    info: Mapping[str, Any],
    runner: TorchRunner,
    cache: PrefixCache,
    offload: EngineStores | None,
) -> tuple[HitAudit, ChainQuarantine]:
    """The audit of an engine, and the chains in quarantine, which it also honours without an audit of its own. `info` is
    that of the model, for reports."""
    if offload is None:
        quarantine, labels, loss = ChainQuarantine(None, info["namespace"]), [], ""
    else:
        quarantine = ChainQuarantine(offload.store, info["namespace"], offload.erasing)
        labels, loss = [tier.label for tier in offload.store.tiers], offload.units[0].layouts[0].loss

    def differs(mismatch: Mismatch) -> None:
        quarantine.add(mismatch)
        if config.audit_reports is not None:
            write_report(Path(config.audit_reports), report(mismatch, info, evidence=config.audit_evidence))

    audit = HitAudit(
        runner, cache, quarantine, differs,
        every=config.audit_every, budget=config.audit_budget, labels=labels, loss=loss,
        exact=not info["inexact"],
    )  # fmt: skip
    return audit, quarantine


def report(mismatch: Mismatch, info: Mapping[str, Any], *, evidence: bool) -> dict[str, Any]:
    """A JSON object. With evidence it has the tokens, and the wrong KV in base64."""
    prompt = token_bytes(mismatch.tokens)
    layers = [
        {"layer": layer, "keys": keys, "values": values, "noise_keys": noise[0], "noise_values": noise[1]}
        for layer, (keys, values), noise in zip(mismatch.layers, mismatch.distances, mismatch.noise, strict=True)
    ]
    made: dict[str, Any] = {
        "format": FORMAT,
        "foreword": __version__,
        "time": time.time(),
        "model": info,
        "root": mismatch.root.hex(),
        "keys": [key.hex() for key in mismatch.keys],
        "block": mismatch.block,
        "group": mismatch.group,
        "source": mismatch.source,
        "tolerance": mismatch.tolerance,
        "layers": layers,
        "prompt_tokens": len(mismatch.tokens),
        "prompt_sha256": sha256(prompt).hexdigest(),
    }
    if evidence:
        made |= {"tokens": mismatch.tokens.tolist(), "found": b64encode(mismatch.found).decode()}
    return made


def write_report(folder: Path, made: dict[str, Any]) -> None:
    """Write a report into a folder, readable by its owner only. A failure is logged."""
    path = folder / f"audit-{int(made['time'])}-{made['keys'][-1][:12]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(made, file, indent=1)
    except OSError as error:
        log.error("the report of an audit cannot be written: %s", error)
    else:
        log.error("the report of the audit is %s", path)
