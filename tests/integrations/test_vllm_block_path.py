"""The way of a KV block under a real vLLM: which files it passes, saved and loaded."""

from __future__ import annotations

from pathlib import Path

from vllm_process import make_model, needs_vllm, run

pytestmark = needs_vllm
# Files of features that the requests do not ask for, or that are not configured. They are behind one question each.
SWITCHED_OFF = {
    "blocks/session_book.py",  # no session is named
    "decoders.py",
    "integrations/vllm_extras/agent_sessions.py",
    "integrations/vllm_extras/handoff.py",  # no `transfer`
    "integrations/vllm_extras/retentions.py",  # nothing is kept
    "offload/direct_tier.py",  # no `store.direct`
    "store/sealing.py",  # no key
    "store/tier_admission.py",  # no rule of admission
}


def test_a_block_passes_what_is_switched_on(tmp_path: Path) -> None:
    """A block is saved to memory and disk, and loaded from each, and passes no file of a feature that no request asks for and
    no setting turns on. A load from memory enters no module of the disk."""
    job = {"model": str(make_model(tmp_path / "model")), "folder": str(tmp_path)}
    found = {name: {file for file, _ in calls} for name, calls in run("vllm_path_script.py", job)["found"].items()}
    assert list(found) == ["saved", "loaded from memory", "loaded from disk"]
    for way, files in found.items():
        assert {"integrations/vllm/connector.py", "offload/manager.py", "store/tiered.py"} <= files, way
        assert not SWITCHED_OFF & files, way
    assert {"store/frame.py", "store/disk/writer.py", "offload/writer.py"} <= found["saved"]
    assert not [file for file in found["loaded from memory"] if file.startswith("store/disk/")]
