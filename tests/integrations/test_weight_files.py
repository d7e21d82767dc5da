"""What names the weights of an engine that Foreword does not load itself: vLLM's and SGLang's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreword.errors import ModelUnsupported
from foreword.integrations.weight_files import weights_digest


def checkpoint(folder: Path, classes: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "own_model.py").write_text("OWN = 1")
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "own_model.C", "AutoModel": classes}}))
    return folder


def test_code_of_another_repository(tmp_path: Path) -> None:
    """Code that a checkpoint takes from another repository is part of its digest where code is run, and one that is not on this
    machine is an error: it could be any."""
    other = checkpoint(tmp_path / "code", "own_model.M")
    model = checkpoint(tmp_path / "model", f"{other}--own_model.M")
    plain, found = weights_digest(model), [weights_digest(model, code=True)]
    (other / "helper.py").write_text("OTHER = 1")
    found.append(weights_digest(model, code=True))
    (other / "helper.py").write_text("OTHER = 2")
    found.append(weights_digest(model, code=True))
    assert len({plain, *found}) == 4 and weights_digest(model) == plain
    missing = checkpoint(tmp_path / "missing", "not-here/code--own_model.M")
    with pytest.raises(ModelUnsupported, match="fingerprint"):
        weights_digest(missing, code=True)
