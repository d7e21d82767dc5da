"""The drift check (`vllm_drift.py`): what it takes for used, and which changes of a vLLM it lists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from vllm_drift import FOREWORD, HANDED, SPECS, WATCHED, Package, uses

SCRIPT = Path(__file__).parent / "vllm_drift.py"
VLLM = os.environ.get("FOREWORD_VLLM_PYTHON", "")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
OLD = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '0.50.0'",
    "vllm/v1/__init__.py": "",
    BASE: """
class KVConnectorBase_V1:
    def start_load_kv(self, forward_context, **kwargs): "Loads."
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def vanishes(self): ...
class SupportsHMA: ...
""",
    "vllm/v1/engine/core.py": "class EngineCore:\n    def set_weight_version(self, version): return version\n",
    "vllm/v1/attention/backends/cpu_attn.py": "def _get_attn_isa(dtype, block_size, head_size=None): return 'vec'",
    "vllm/v1/core/kv_cache_utils.py": "def resolve_block_hashes(a, b, c): ...\ndef maybe_convert_block_hash(one): ...",
    "vllm/distributed/kv_events.py": "class BlockStored:\n    block_hashes: list\n    token_ids: list",
    "vllm/v1/kv_cache_interface.py": "class KVCacheSpec:\n    block_size: int\nclass FullAttentionSpec(KVCacheSpec): ...",
    "vllm/v1/request.py": "class Request:\n    def __init__(self):\n        self.cache_salt = None",
}
NEW = {
    **OLD,
    "vllm/_version.py": "__version__ = version = '0.51.0'",
    BASE: """
from vllm.moved import WaitsForSaves
class KVConnectorBase_V1(WaitsForSaves):
    def start_load_kv(self, forward_context: object, **kwargs): "Loads KV."
    def save_kv_layer(self, layer_name, kv_layer, **kwargs): ...
    def sleeps_well(self, hours=8): ...
class SupportsHMA: ...
""",
    "vllm/moved.py": "class WaitsForSaves:\n    def wait_for_save(self): ...",
    "vllm/v1/engine/core.py": "class EngineCore:\n    def set_weights_version(self, version): return version\n",
    "vllm/v1/attention/backends/cpu_attn.py": "def _get_attn_isa(dtype, block_size, head_size=None): return 'amx'",
    "vllm/v1/core/kv_cache_utils.py": "from vllm.v1.core.hashes import *\nfrom .hashes import resolve_block_hashes",
    "vllm/v1/core/hashes.py": "def resolve_block_hashes(a, b, c): ...",
    "vllm/distributed/kv_events.py": "class BlockStored:\n    block_hashes: list\n    token_ids: list\n    more: int = 0",
    "vllm/v1/kv_cache_interface.py": (
        "class KVCacheSpec:\n    block_size: int\n    is_draft: bool = False\n"
        "class FullAttentionSpec(KVCacheSpec): ...\nclass NewSpec(KVCacheSpec): ..."
    ),
    "vllm/v1/request.py": "class Request:\n    def __init__(self):\n        self.salt = None",
}  # fmt: skip


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def drift(old: Path, new: Path) -> tuple[int, dict[str, str]]:
    """Status, and what is said of each definition."""
    done = subprocess.run([sys.executable, SCRIPT, old, new], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.partition("\n\n")[0].splitlines()]
    return done.returncode, {what: f"{kind} {rest}" for kind, what, rest in lines}


@pytest.mark.extended
def test_changes_are_listed(tmp_path: Path) -> None:
    """A wheel beside an environment: what Foreword uses and is gone or has other parameters fails the check; new hooks, specs
    and fields are listed; a definition that moved, and another docstring or type, are no change."""
    old = folder(tmp_path / "old" / "lib" / "python3.12" / "site-packages", OLD).parents[2]
    status, found = drift(old, wheel(tmp_path / "new.whl", NEW))
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
    core = "vllm.v1.core.kv_cache_utils"
    assert status == 1
    assert found[f"{base}.save_kv_layer"].startswith(
        "parameters (self, layer_name, kv_layer, attn_metadata, **kwargs) -> "
    )
    assert found[f"{core}.maybe_convert_block_hash"] == "gone (tier_events.py)"
    assert re.fullmatch(r"gone \(.*scheduler_side\.py\)", found["vllm.v1.engine.core.EngineCore.set_weight_version"])
    assert found["vllm.v1.request.Request.cache_salt"] == "gone (read)"
    assert found[f"{base}.vanishes"] == "gone (not used)"
    assert found[f"{base}.sleeps_well"] == "new (self, hours=8) (not used)"
    assert found["vllm.distributed.kv_events.BlockStored.more"] == "new (not used)"
    assert found[f"{SPECS}.NewSpec"] == "new (not used)" and found[f"{SPECS}.KVCacheSpec.is_draft"].startswith("new")
    assert found["vllm.v1.attention.backends.cpu_attn._get_attn_isa"].startswith("inside (connector_config.py")
    for same in (f"{base}.start_load_kv", f"{base}.wait_for_save", f"{core}.resolve_block_hashes"):
        assert same not in found
    assert len(found) == 10
    same, nothing = drift(wheel(tmp_path / "old.whl", OLD), old)
    assert (same, nothing) == (0, {})


@pytest.mark.extended
def test_what_counts_as_used() -> None:
    """Every import from vLLM in Foreword's sources counts, and every method that it wraps: the list cannot go stale."""
    used = uses()
    modules = {module for module, _, _ in used.names}
    sources = [path.read_text(encoding="utf-8") for path in FOREWORD.rglob("*.py")]
    for module in {one for text in sources for one in re.findall(r"^\s*from (vllm[\w.]*) import", text, re.MULTILINE)}:
        assert module in modules
    wrapped = {one for text in sources for one in re.findall(r"follow_engine\([^\n]*\"(\w+)\"", text)}
    assert wrapped and all(("vllm.v1.engine.core", "EngineCore", one) in used.names for one in wrapped)
    assert ("vllm.lora.lora_model", "LoRAModel", "from_local_checkpoint") in used.names
    assert ("vllm.v1.core", "kv_cache_utils", "generate_block_hash_extra_keys") in used.names
    hooks = used.hooks["vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"]
    assert {"start_load_kv", "unregister_kv_caches", "get_num_new_matched_tokens"} <= hooks


@pytest.mark.skipif(not VLLM, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
def test_tables_fit_the_real_vllm() -> None:
    """Every class of the tables is there, and Foreword reads something of each that vLLM hands to it."""
    package, used = Package(Path(VLLM).parent.parent), uses()
    for module, names in {**HANDED, **WATCHED}.items():
        for name in names:
            found = package.find(module, name)
            assert found is not None, f"{module}.{name}"
            if module in HANDED:
                assert used.attributes & set(package.members(found)), f"{module}.{name}"
    for module, name, _ in used.names:
        assert package.find(module, name) is not None, f"{module}.{name}"
