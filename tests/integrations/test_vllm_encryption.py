"""Encrypted stores under a real vLLM. Needs FOREWORD_VLLM_PYTHON, an interpreter with vLLM; skipped without."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from vllm_process import answers, disk, needs_vllm, run

from foreword.blocks.salt import Salt
from foreword.referee.models import KINDS
from foreword.store.data_keys import DataKeys
from foreword.store_config import EncryptionConfig

pytestmark = needs_vllm


def test_encrypted_and_forgotten(tmp_path: Path) -> None:
    """Answers of vLLM with encryption are those that it computes, also from the store after a restart, and what is in the store
    is encrypted. Once the data key of vLLM without tenants is destroyed a new vLLM finds nothing of it, and stores anew."""
    config = EncryptionConfig(key_store=str(tmp_path / "keys"), master_keys=(f"test:{'5a' * 32}",))
    environment = {
        "FOREWORD_ENCRYPTION_KEY_STORE": str(tmp_path / "keys"),
        "FOREWORD_ENCRYPTION_MASTER_KEYS": config.master_keys[0],
    }
    kind = KINDS["Llama"]
    job = {
        "model": str(kind.build(tmp_path / "model")),
        "kv_bytes": 256 << 20,
        "llm": kind.arguments(),
        "prompts": {"seed": 1, "count": 8},
    }

    def vllm(*passes: str) -> dict[str, Any]:
        runs = [{"store": [disk(tmp_path)], "passes": list(passes)}]
        [found] = run("vllm_kinds_script.py", {**job, "runs": runs}, **environment)["results"]
        assert not any(tier["bad"] or tier["errors"] for tier in found["tiers"])
        return dict(found)

    first, restarted = vllm("ask", "forget", "ask"), vllm("ask")
    assert first["tiers"][0]["hit"] > 0 and restarted["tiers"][0]["hit"] > 0
    cold = answers(first["answers"][0])
    assert cold == answers(first["answers"][1]) == answers(restarted["answers"][0])
    files = [path for path in (tmp_path / "kv").glob("?" * 32 + "/*/*/*") if path.is_file()]
    assert files and all(path.read_bytes()[-192 + 131] & 0x80 for path in files)
    with closing(DataKeys(config)) as keys:
        assert len(keys.destroy(Salt().prefix)) == 1
    forgotten = vllm("ask")
    assert not forgotten["tiers"][0]["hit"] and answers(forgotten["answers"][0]) == cold
    again = vllm("ask")
    assert again["tiers"][0]["hit"] > 0 and answers(again["answers"][0]) == cold
