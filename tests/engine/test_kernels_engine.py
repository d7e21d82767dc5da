"""The engine with and without the compiled kernels: compilation, which layers they compute, equal output."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from example_counts import represented
from safetensors.torch import load_file, save_file

from foreword import compiled_code
from foreword.cli.doctor import Finding, examine
from foreword.compiled_code import CannotBuild
from foreword.configuration import Config
from foreword.engine.decoder import DecoderForward, NormForward
from foreword.engine.kernels import native
from foreword.engine.model import load_model
from foreword.engine.self_check import self_check
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError, ModelUnsupported

Folder = Callable[[str], Path]
Find = Callable[[str], tiny.Reference]
Make = Callable[..., LLM]
PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 5, 13, 26, 41))]
# Layers of these are computed whole, of the others not: other norms, other feed-forwards, other embeddings of positions.
WHOLE = {"llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3"}


def why_not_fused() -> str:
    """Why no decoder layer is fused here; empty if they are."""
    try:
        native.load()
        return ""
    except CannotBuild as error:
        return str(error)


needs_kernels = pytest.mark.skipif(bool(why_not_fused()), reason=f"layers are not fused: {why_not_fused()}")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a C++ compiler and without compiled kernels."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    native.load.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Libraries that a test has loaded are not used by the next test."""
    yield
    native.load.cache_clear()


def compiler(folder: Path, text: str) -> Path:
    """A compiler that is a shell script."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fused_layers(model: Any) -> int:
    """How many decoder layers the kernels compute whole."""
    return sum(isinstance(module.__dict__.get("forward"), DecoderForward) for module in model.modules())


# `auto` measures, and then uses what the others do.
@pytest.mark.parametrize("kernels", [pytest.param("auto", marks=pytest.mark.slow), "native", "torch"])
@pytest.mark.parametrize(
    "family",
    represented(["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"], "gpt_oss"),
)
def test_same_output(family: str, kernels: str, engine: Make, reference: Find) -> None:
    """Greedy output is `generate()`'s with the kernels and without, cold and cached."""
    llm, truth = engine(family, kernels=kernels), reference(family)
    for _ in range(2):
        for tokens, output in zip(PROMPTS, llm.generate(PROMPTS, tiny.greedy(16)), strict=True):
            truth.check(tokens, output.outputs[0], 16)
    llm.check()


@pytest.mark.extended
def test_two_threads(engine: Make, reference: Find) -> None:
    """Two threads give the same output as one."""
    llm = engine("llama", threads=2)
    try:
        for tokens, output in zip(PROMPTS, llm.generate(PROMPTS, tiny.greedy(8)), strict=True):
            reference("llama").check(tokens, output.outputs[0], 8)
    finally:
        torch.set_num_threads(1)


@needs_kernels
@pytest.mark.parametrize(
    "family",
    represented(["llama", "qwen3", "phi3", "smollm3", "gemma2", "olmo2", "mixtral", "gpt2"], "gemma2", "gpt2"),
)
def test_layers_that_are_fused(family: str, folder: Folder) -> None:
    """Only layers of Llama's kind are computed whole, and the model passes its self-check."""
    loaded = load_model(EngineConfig(model=str(folder(family)), dtype="float32"))
    layers = fused_layers(loaded.model)
    assert layers == (len(loaded.layers.groups[0]) if family in WHOLE else 0)
    assert self_check(loaded, 4) < 1e-4


@needs_kernels
@pytest.mark.parametrize("dtype", represented(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("change", ["activation", "residual", "epsilon", "order", "between", "none"])
def test_different_layer_is_not_replaced(
    change: str, dtype: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that looks like Llama's but computes something else keeps its own `forward`. What a model does between two
    layers is done."""
    kinds = transformers.models.llama.modeling_llama
    layer = kinds.LlamaDecoderLayer
    honest, norm = layer.forward, kinds.LlamaRMSNorm

    def residual(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(self, hidden_states, *args, **kwargs) + 0.2 * hidden_states

    def order(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)) + honest(
            self, hidden_states, *args, **kwargs
        )  # fmt: skip

    if change == "activation":
        monkeypatch.setattr(
            kinds.LlamaMLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))
        )
    elif change == "epsilon":
        before = norm.forward
        monkeypatch.setattr(norm, "forward", lambda self, x: before(self, x) * 1.1)
    elif change == "between":
        call = layer.__call__
        monkeypatch.setattr(layer, "__call__", lambda self, x, *args, **kwargs: call(self, 1.25 * x, *args, **kwargs))
    elif change != "none":
        monkeypatch.setattr(layer, "forward", {"residual": residual, "order": order}[change])
    loaded = load_model(EngineConfig(model=str(folder("llama")), dtype=dtype))
    assert fused_layers(loaded.model) == (3 if change in ("between", "none") else 0)
    norms = sum(isinstance(module.__dict__.get("forward"), NormForward) for module in loaded.model.modules())
    assert norms == (0 if change == "epsilon" else 7)
    self_check(loaded, 4)


@needs_kernels
@pytest.mark.parametrize("family", represented(["llama", "qwen3", "smollm3", "gemma2", "mixtral"], "smollm3", "gemma2"))
def test_a_step_in_one_call(family: str, engine: Make, reference: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels compute whole layers, a step that only decodes is one call of theirs, and its tokens are the
    model's own; in other models each product is a call."""
    calls: list[str] = []
    for name in ("decode", "multiply", "norm"):
        kernel = getattr(native.Kernels, name)
        monkeypatch.setattr(
            native.Kernels, name, lambda *args, kernel=kernel, name=name: (calls.append(name), kernel(*args))[1]
        )
    llm = engine(family, kernels="native")
    [found] = llm.generate([PROMPTS[2]], tiny.greedy(1))
    calls.clear()
    [found] = llm.generate([PROMPTS[2]], tiny.greedy(9))
    reference(family).check(PROMPTS[2], found.outputs[0], 9)
    assert (calls[-8:] == ["decode"] * 8) == (family in WHOLE)


@needs_kernels
@pytest.mark.parametrize("change", ["cap", "input", "output", "none"])
def test_code_around_the_layers_is_run(change: str, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computations of a model before its layers or after them are not left out, even if they change small numbers little."""
    kinds = transformers.models.llama.modeling_llama
    whole, inner = kinds.LlamaForCausalLM, kinds.LlamaModel
    honest, layers = whole.forward, inner.forward

    def capped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = honest(self, *args, **kwargs)
        found.logits = torch.tanh(found.logits / 3e4) * 3e4
        return found

    def scaled(self: Any, *args: Any, input_ids: Any, **kwargs: Any) -> Any:
        return layers(self, *args, **kwargs | {"inputs_embeds": self.embed_tokens(input_ids) * 1.5})

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = layers(self, *args, **kwargs)
        found.last_hidden_state = found.last_hidden_state + 1.0
        return found

    if change == "cap":
        monkeypatch.setattr(whole, "forward", capped)
    elif change != "none":
        monkeypatch.setattr(inner, "forward", {"input": scaled, "output": shifted}[change])
    loaded = load_model(EngineConfig(model=str(folder("llama")), dtype="float32", kernels="native"))
    assert (loaded.decode is not None) == (change == "none")
    self_check(loaded, 4)


@needs_kernels
def test_another_activation(folder: Folder, tmp_path: Path) -> None:
    """A layer like Llama's with another activation is not replaced, even if its weights are tiny."""
    copy = tmp_path / "gelu"
    shutil.copytree(folder("llama"), copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"hidden_act": "gelu"}))
    for path in copy.glob("*.safetensors"):
        weights = load_file(path)
        small = {name: tensor * 1e-7 if "gate_proj" in name else tensor for name, tensor in weights.items()}
        save_file(small, path, {"format": "pt"})
    loaded = load_model(EngineConfig(model=str(copy), dtype="float32"))
    assert fused_layers(loaded.model) == 0


@needs_kernels
def test_self_check_sees_the_kernels(folder: Folder) -> None:
    """The comparison at start runs with the kernels: one that computes a little wrong is found."""
    loaded = load_model(EngineConfig(model=str(folder("llama")), dtype="float32"))
    forwards = (module.__dict__.get("forward") for module in loaded.model.modules())
    forward = next(forward for forward in forwards if isinstance(forward, DecoderForward))
    forward._rotated = False
    with pytest.raises(ModelUnsupported, match="differ from the model's own"):
        self_check(loaded, 4)


@needs_kernels
def test_layers_are_announced(engine: Make) -> None:
    """`on_written` is called for each layer in order, also where the kernels compute whole layers."""
    llm = engine("llama")
    runner, written = llm._core._runner, []
    runner.on_written = written.append
    llm.generate([PROMPTS[2]], tiny.greedy(3))
    assert written == [0, 1, 2] * 3


def test_parameters_stay(folder: Folder) -> None:
    """Kernels or not, parameters and fingerprint are the same."""
    prints = {
        load_model(EngineConfig(model=str(folder("llama")), dtype="float32", kernels=kernels)).fingerprint
        for kernels in ("auto", "torch")
    }
    assert len(prints) == 1


@pytest.mark.usefixtures("no_compiler")
def test_no_compiler(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a compiler the engine runs on PyTorch operators and logs one warning; `kernels=native` is an error."""
    with caplog.at_level(logging.WARNING):
        loaded = load_model(EngineConfig(model=str(llama), dtype="float32"))
    assert loaded.kernels is None
    assert self_check(loaded, 4) < 1e-4
    warnings = [record.message for record in caplog.records if "native kernels" in record.message]
    assert len(warnings) == 1
    assert "install one" in warnings[0]
    with pytest.raises(ConfigError, match="there is no C\\+\\+ compiler"):
        load_model(EngineConfig(model=str(llama), dtype="float32", kernels="native"))


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an installed wheel with kernels: here those that were compiled on this machine."""
    monkeypatch.delenv("CXX", raising=False)
    fitting = [
        one
        for one in compiled_code.SHIPPED
        if one.machine == platform.machine() and one.needs <= compiled_code.processor_flags()
    ]
    if not fitting or shutil.which("c++") is None:
        pytest.skip("wheels have no kernels for this processor, or there is no compiler to make some")
    compiled = native.open_library(compiled_code.library()) and compiled_code.library()
    folder = tmp_path / "compiled"
    folder.mkdir()
    shutil.copy(compiled, folder / compiled_code.shipped_name(fitting[0], compiled_code.SOURCES))
    monkeypatch.setattr(compiled_code, "SHIPPED_FOLDER", str(folder))
    return folder


def test_kernels_of_the_wheel(
    wheel: Path, no_compiler: None, engine: Make, reference: Find, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """An installed wheel needs no compiler: its kernels compute, also with `kernels=native`, and nothing is compiled."""
    llm, truth = engine("llama", kernels="native"), reference("llama")
    for tokens, output in zip(PROMPTS, llm.generate(PROMPTS, tiny.greedy(8)), strict=True):
        truth.check(tokens, output.outputs[0], 8)
    assert kernels_of("auto").text.startswith("native") and not caplog.records
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_kernels_of_another_wheel(wheel: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a wheel are not used for other sources, for a processor without their instructions, or where `CXX` asks for
    a build."""
    assert compiled_code.shipped_library() is not None
    monkeypatch.setenv("CXX", str(wheel / "none"))
    with pytest.raises(CannotBuild, match="CXX names"):
        compiled_code.library()
    monkeypatch.delenv("CXX")
    with monkeypatch.context() as other:
        other.setattr(compiled_code, "processor_flags", frozenset)
        assert compiled_code.shipped_library() is None or platform.machine() == "aarch64"
    assert compiled_code.shipped_library((*compiled_code.SOURCES, *compiled_code.UNIT_SOURCES)) is None


def kernels_of(kernels: str) -> Finding:
    findings = examine(Config(engine=EngineConfig(kernels=kernels)), load=False)
    return next(finding for finding in findings if finding.topic == "kernels")


def test_doctor() -> None:
    """`doctor` says which kernels are in use."""
    assert kernels_of("auto").ok and kernels_of("auto").text.startswith("native")
    assert kernels_of("torch").ok and kernels_of("torch").text.startswith("PyTorch")


@pytest.mark.usefixtures("no_compiler")
def test_doctor_without_a_compiler() -> None:
    """`doctor` says why there are no native kernels; that is a fault only with `kernels=native`."""
    for kernels in ("auto", "native"):
        finding = kernels_of(kernels)
        assert "there is no C++ compiler" in finding.text
        assert finding.ok == (kernels == "auto")


def test_torch_asks_for_no_compiler(llama: Path, no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    """Setting `kernels=torch` logs nothing about kernels."""
    with caplog.at_level(logging.WARNING):
        assert load_model(EngineConfig(model=str(llama), dtype="float32", kernels="torch")).kernels is None
    assert not [record for record in caplog.records if "kernels" in record.message]


def test_bad_setting() -> None:
    """An unknown value of `kernels` is a configuration error that lists the values."""
    with pytest.raises(ConfigError, match="must be auto, native, torch or triton, not 'fast'"):
        EngineConfig(kernels="fast")


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed compilation reports the compiler's error and leaves no partial file."""
    script = 'case "$1" in --version) echo 1;; *) echo "fatal error: no such thing" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CannotBuild, match="fatal error: no such thing"):
        compiled_code.library()
    assert list((tmp_path / "cache" / "foreword").iterdir()) == []
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(CannotBuild, match="CXX names"):
        compiled_code.library()


def test_a_compiler_that_its_parent_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system limits the time of a compiler, and so ends one whose parent was killed and cannot."""
    script = f'case "$1" in --version) echo 1;; *) ulimit -t > {tmp_path}/limit; exit 1;; esac'
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CannotBuild):
        compiled_code.library()
    assert (tmp_path / "limit").read_text(encoding="ascii") == "300\n"


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unwritable cache folder is an error that names the folder and the setting."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CannotBuild, match="set XDG_CACHE_HOME"):
        compiled_code.library()


def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels of one source, compiler and flags are compiled once, also if several processes come at the same time; other flags
    make another file."""
    script = (
        'case "$1" in --version) echo 1; exit;; esac; '
        f'echo x >> {tmp_path / "calls"}; while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    )
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = tmp_path / "calls"
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda _: compiled_code.library(), range(4)))
    (path,) = paths
    assert path.read_text(encoding="utf-8") == "made\n"
    before = calls.read_text(encoding="utf-8")
    assert compiled_code.library() == path
    assert calls.read_text(encoding="utf-8") == before
    assert compiled_code.library((*compiled_code.FLAGS, "-DOTHER")) != path
    assert sorted(entry.suffix for entry in path.parent.iterdir()) == [".so", ".so"]


@pytest.mark.slow
def test_one_openmp_runtime(llama: Path) -> None:
    """Kernels use the OpenMP runtime of torch: a second thread pool would compete for the same cores."""
    script = (
        "import sys; from foreword.entrypoints.llm import LLM; from foreword import SamplingParams\n"
        "llm = LLM(sys.argv[1], dtype='float32', kv_memory='256 tokens', threads=2, kernels='native')\n"
        "llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "print(sum('omp' in path.rsplit('/', 1)[-1] for path in maps), sum('kernels-' in path for path in maps))\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc here")
    done = subprocess.run(
        [sys.executable, "-c", script, str(llama)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ,
    )
    assert done.stdout.split() == ["1", "1"]
