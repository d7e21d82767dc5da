"""Named prefixes that builds registered which identified models otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny import greedy

from foreword.engine.model import load_model
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM
from foreword.integrations.model_identity import earlier_fingerprint
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore

Make = Callable[..., LLM]
_TEXT = "import os\nimport sys\n" * 4


def linear() -> Any:
    module: Any = torch.nn.Linear(3, 2)
    module.weight.data = torch.arange(6.0).reshape(2, 3)
    module.bias.data = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)
    keys = {"hidden_size": 3, "eos_token_id": 2, "_name_or_path": "x", "dtype": "float32"}
    module.config = SimpleNamespace(to_dict=lambda: keys)
    return module


def test_the_fingerprint_of_earlier_builds() -> None:
    """The fingerprint of earlier builds is as 92ee24a and 366dbde2 computed it."""
    assert earlier_fingerprint(linear()).hex() == "50b50843c97de9931847cbb6c47276b7f471c1e399472e76eb728395e5008d30"


def rename(store: Store, before: str, now: str) -> None:
    """Give the records of named prefixes the model that another build writes into their keys."""
    until = time.monotonic() + 60
    for key in list(store.records(f"prefixes/{before}/", deadline=until)):
        record = store.get_record(key, deadline=until)
        assert record is not None
        store.put_record(key.replace(before, now), record, deadline=until)
        store.delete_record(key, deadline=until)


def test_names_of_an_earlier_build(engine: Make, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Names of an earlier build are listed and used, and their KV is computed anew. A prefix that is removed then does not come
    back, and a prefix that is replaced stays as it is now. The records of the earlier build stay for its servers, but for
    removed ones."""
    where = f"disk://{tmp_path}/store?size=64MiB"
    config = EngineConfig(model=str(folder("llama")), dtype="float32", kv_memory="64 tokens", block_size=4)
    earlier = load_model(config, named=["another"]).earlier.hex()[:32]
    with engine("llama", store=where) as llm:
        fingerprint = llm.info.fingerprint[:32]
        for name in ("kept", "removed", "replaced"):
            llm.add_prefix(name, _TEXT + name)
    with closing(DiskStore(f"{tmp_path}/store", 1 << 26)) as store:
        rename(store, fingerprint, earlier)
    with engine("llama", store=where) as llm:
        assert sorted(one.name for one in llm.list_prefixes()) == ["kept", "removed", "replaced"]
        [output] = llm.generate("x = 1", greedy(1), prefix="kept")
        assert output.error is None
        llm.remove_prefix("removed")
        llm.add_prefix("replaced", "another text", replace=True)
    with engine("llama", store=where) as llm:
        found = {one.name: one.content for one in llm.list_prefixes()}
        assert found == {"kept": f"{_TEXT}kept", "replaced": "another text"}
    with closing(DiskStore(f"{tmp_path}/store", 1 << 26)) as store:
        kept = store.records(f"prefixes/{earlier}/", deadline=time.monotonic() + 60)
        assert sorted(key.rpartition("/")[2] for key in kept) == ["kept", "replaced"]


def test_names_of_another_model(engine: Make, tmp_path: Path) -> None:
    """Names that another model has in the same store stay its own."""
    where = f"disk://{tmp_path}/store?size=64MiB"
    with engine("llama", store=where) as llm:
        llm.add_prefix("base", _TEXT)
    with engine("mistral", store=where) as llm:
        assert llm.list_prefixes() == []
