"""Claims about what KV depends on: what differs in one of these must not be given another's KV."""

from __future__ import annotations

import shutil
from typing import Any, Final

from foreword.referee.damage import swap_layers
from foreword.referee.session import Draw, Evidence, Session

_LORA: Final[dict[str, Any]] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def salt(session: Session, draw: Draw) -> Evidence:
    """`cache_salt`: a prompt stored under one salt is not found under another, nor without one."""
    evidence, asked = Evidence(), draw.prompts()
    worker, reference = session.connected(), session.reference(asked)
    session.store(worker, asked, salt="ann")
    for other in ("bob", None):
        found = worker.ask_all(asked, salt=other)
        evidence.must_miss(found, f"under the salt {other}")
        evidence.same(found, reference)
        worker.settle()
        worker.forget()
    found = worker.ask_all(asked, salt="ann")
    evidence.must_hit(found, "under its own salt")
    evidence.same(found, reference)
    return evidence


def adapter(session: Session, draw: Draw) -> Evidence:
    """LoRA adapters: a prompt stored under one is not found under another, nor without one."""
    evidence, asked = Evidence(), draw.prompts()
    one, other = (["one", 1, str(session.adapter(1))], ["other", 2, str(session.adapter(2))])
    alone = session.alone(**_LORA)
    right = {str(each): alone.ask_all(asked, adapter=each) for each in (one, other, None)}
    worker = session.connected(**_LORA)
    session.store(worker, asked, adapter=one)
    for each in (other, None):
        found = session.store(worker, asked, adapter=each)
        evidence.must_miss(found, f"under {each[0] if each else 'no'} adapter")
        evidence.same(found, right[str(each)])
    found = worker.ask_all(asked, adapter=one)
    evidence.must_hit(found, "under its own adapter")
    evidence.same(found, right[str(one)])
    return evidence


def adapter_version(session: Session, draw: Draw) -> Evidence:
    """A LoRA adapter whose files are replaced under the same name and path, after a restart."""
    evidence, asked = Evidence(), draw.prompts()
    used = session.folder / "adapter-used"
    right = session.alone(**_LORA).ask_all(asked, adapter=["new", 3, str(session.adapter(2))])
    shutil.copytree(session.adapter(1), used, dirs_exist_ok=True)
    name = ["used", 1, str(used)]
    worker = session.connected(**_LORA)
    session.store(worker, asked, adapter=name)
    evidence.must_hit(session.store(worker, asked, adapter=name), "before the change")
    session.end(connected=True)
    shutil.copytree(session.adapter(2), used, dirs_exist_ok=True)
    found = session.connected(**_LORA).ask_all(asked, adapter=name)
    evidence.must_miss(found, "after the change")
    evidence.same(found, right)
    return evidence


def weights(session: Session, draw: Draw) -> Evidence:
    """Other weights under the same model path, after a restart."""
    evidence, asked = Evidence(), draw.prompts()
    home = session.folder / "replaced"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(session.model(), home)
    worker = session.connected(home)
    session.store(worker, asked)
    evidence.must_hit(session.store(worker, asked), "before the change")
    session.end(connected=True)
    swap_layers(home)
    found = session.connected(home).ask_all(asked)
    evidence.must_miss(found, "after the change")
    evidence.same(found, session.alone(home).ask_all(asked))
    return evidence


def dtype(session: Session, draw: Draw) -> Evidence:
    """Prompts stored by a server that computes in float32, asked by one that computes in bfloat16."""
    evidence, asked = Evidence(), draw.prompts()
    session.store(session.connected(), asked)
    worker = session.connected(dtype="bfloat16")
    found = session.store(worker, asked)
    evidence.must_miss(found, "of another dtype")
    evidence.same(found, session.alone(dtype="bfloat16").ask_all(asked))
    evidence.must_hit(worker.ask_all(asked), "of its own dtype")
    return evidence


def block_size(session: Session, draw: Draw) -> Evidence:
    """Prompts stored with blocks of 32 tokens, asked by a server with blocks of 64."""
    evidence, asked = Evidence(), draw.prompts()
    reference = session.reference(asked)
    session.store(session.connected(), asked)
    worker = session.connected(block_size=64)
    evidence.same(session.store(worker, asked), reference)
    found = worker.ask_all(asked)
    evidence.must_hit(found, "with blocks of its own size")
    evidence.same(found, reference)
    return evidence
