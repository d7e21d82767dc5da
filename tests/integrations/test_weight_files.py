"""Names of the weights of engines that Foreword does not load itself: vLLM's and SGLang's checkpoints."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foreword.errors import ModelUnsupported
from foreword.integrations import tensor_files
from foreword.integrations.model_identity import weights_digest
from foreword.integrations.tensor_files import file_tensors
from foreword.integrations.weight_files import read_checkpoint


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    names = ("model.embed_tokens", "model.layers.0.q", "model.layers.1.q", "model.norm", "lm_head")
    return {f"{name}.weight": torch.randn(6, 4, generator=draw) for name in names}


def model(
    folder: Path, name: str, weights: dict[str, torch.Tensor] | None = None, *, part: slice = slice(None)
) -> Path:
    """A folder with a file that has these weights, or every second tensor of them."""
    folder.mkdir(exist_ok=True)
    chosen = dict(list((weights or tensors()).items())[part])
    if name.endswith(".safetensors"):
        save_file(chosen, folder / name)
    else:
        torch.save(chosen, folder / name)
    return folder


def test_the_same_tensors_in_other_files(tmp_path: Path) -> None:
    """Weights have one identity, whatever files have them: safetensors, torch's, shards, other names, beside what is not read;
    and without the prefix that an export of the model alone does not have."""
    wanted = read_checkpoint(model(tmp_path / "one", "model.safetensors"))
    assert wanted.embeds and all(wanted.heads.values())
    shards = model(tmp_path / "shards", "a-1-of-2.safetensors", part=slice(0, None, 2))
    model(shards, "a-2-of-2.safetensors", part=slice(1, None, 2))
    beside = model(model(tmp_path / "beside", "model.safetensors"), "training_args.bin", tensors(2))
    model(beside, "old.pt", tensors(3))
    indexed = model(model(tmp_path / "indexed", "model.safetensors"), "duplicate.safetensors", tensors(4))
    index = {"weight_map": dict.fromkeys(tensors(), "model.safetensors")}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    exported = {key.removeprefix("model."): value for key, value in tensors().items()}
    found = [
        read_checkpoint(model(tmp_path / "bin", "pytorch_model.bin")),
        read_checkpoint(model(model(tmp_path / "pt", "x.pt"), "model.safetensors", tensors(5)), "pt"),
        read_checkpoint(shards),
        read_checkpoint(beside),
        read_checkpoint(indexed),
        read_checkpoint(model(tmp_path / "exported", "model.safetensors", exported)),
        read_checkpoint(tmp_path / "one", "safetensors"),
    ]
    assert found == [wanted] * len(found)


def bit(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    weights[name].view(torch.uint8)[3, 7] ^= 1
    return weights


@pytest.mark.parametrize(
    "change",
    [
        lambda found: bit(found, "model.layers.1.q.weight"),
        lambda found: bit(found, "model.embed_tokens.weight"),
        lambda found: {**found, "model.layers.0.q.weight": found["model.layers.1.q.weight"].clone()},
        lambda found: {**found, "model.layers.0.q.weight": found["model.layers.0.q.weight"].reshape(4, 6)},
        lambda found: {**found, "model.layers.0.q.weight": found["model.layers.0.q.weight"].view(torch.int32)},
        lambda found: {key.replace("layers.1", "layers.2"): value for key, value in found.items()},
        lambda found: {**found, "model.layers.0.bias": torch.zeros(4)},
    ],
    ids=["bit", "bit of an embedding", "other bytes", "shape", "dtype", "name", "more"],
)
def test_any_change_of_a_tensor(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """A change of one bit, of a shape, a dtype or a name is another model, whatever file it is in."""
    before = read_checkpoint(model(tmp_path / "before", "model.safetensors")).weights
    for name, load_format in (("model.safetensors", "auto"), ("model.bin", "auto"), ("x.pt", "pt")):
        changed = model(tmp_path / name, name, change(tensors()))
        assert read_checkpoint(changed, load_format).weights != before


def test_what_stands_behind_the_layers(tmp_path: Path) -> None:
    """The head and the last norm are apart, so that a model can prove that they say nothing about KV; all count where nothing
    is proven."""
    one = model(tmp_path / "one", "model.safetensors")
    for name, part in (("lm_head.weight", "head"), ("model.norm.weight", "norm")):
        other = model(tmp_path / part, "model.safetensors", bit(tensors(), name))
        mine, found = read_checkpoint(one), read_checkpoint(other)
        assert mine.weights == found.weights
        assert [key for key in mine.heads if mine.heads[key] != found.heads[key]] == [part]
        assert weights_digest(one) != weights_digest(other)
    tied = {key: value for key, value in tensors().items() if "embed_tokens" not in key}
    assert not read_checkpoint(model(tmp_path / "tied", "model.safetensors", tied)).embeds


def test_gguf(tmp_path: Path) -> None:
    """A GGUF file has weights and configuration, so its bytes count; not its name, nor whether a model is named by the file."""
    for folder, name, data in (("a", "x", b"1"), ("b", "y", b"1"), ("c", "x", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.gguf").write_bytes(data)
    one = read_checkpoint(tmp_path / "a", "gguf")
    assert one == read_checkpoint(tmp_path / "b") == read_checkpoint(tmp_path / "b" / "y.gguf")
    assert one != read_checkpoint(tmp_path / "c", "gguf")


def test_a_load_format_that_is_not_known(tmp_path: Path) -> None:
    """A plug-in's load format may read any file and change what it reads: format, configuration and every file count."""
    folder = model(model(tmp_path / "one", "model.safetensors"), "model.pt", tensors(2))
    found = [read_checkpoint(folder).weights, read_checkpoint(folder, "own").weights]
    found.append(read_checkpoint(folder, "own", {"scale": 2}).weights)
    model(folder, "model.pt", tensors(3))
    found.append(read_checkpoint(folder, "own").weights)
    assert len(set(found)) == 4 and read_checkpoint(folder).weights == found[0]
    with pytest.raises(ModelUnsupported, match="load format 'mistral'"):
        read_checkpoint(folder, "mistral")


@pytest.mark.parametrize(
    "data", [b"", b"x" * 100, b"\xff" * 8 + b"{}", struct.pack("<Q", 2) + b"[]", b"PK\x03\x04nothing"]
)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".gguf"])
def test_damaged_files_count_as_they_are(data: bytes, suffix: str, tmp_path: Path) -> None:
    """A file that cannot be read as what its name says is identified by its bytes."""
    file = tmp_path / f"model{suffix}"
    file.write_bytes(data)
    [first] = file_tensors(file)
    file.write_bytes(data + b"y")
    [second] = file_tensors(file)
    assert first.dtype == second.dtype == "file" and first.digest != second.digest


def test_digests_are_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is read once for all processes, and again after any change of size, time or inode. One that was just written is
    read again: it could change within the same tick of its times."""
    read: list[Path] = []
    inner = tensor_files._read
    monkeypatch.setattr(tensor_files, "_read", lambda path: read.append(path) or inner(path))
    file = model(tmp_path / "one", "model.safetensors") / "model.safetensors"
    for _ in range(2):
        file_tensors(file)
    assert len(read) == 2, "just written"
    monkeypatch.setattr(tensor_files, "_SETTLED_NS", 0)
    for _ in range(3):
        file_tensors(file)
    assert len(read) == 3
    os.utime(file, ns=(1, 1))
    file_tensors(file)
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    copy.rename(file)
    os.utime(file, ns=(1, 1))
    file_tensors(file)
    assert len(read) == 5


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
