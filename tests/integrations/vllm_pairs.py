"""Pairs of vLLM servers, one behind the other on one store: those with equal KV share it, those with other KV never do.

    FOREWORD_VLLM_PYTHON=PYTHON python tests/integrations/vllm_pairs.py [NAME ...]

prints a table: how many tokens of its prompts the second server finds, how many a server with the first's settings finds, and
how many answers differ from those of the second server alone. Each server is a real vLLM in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from vllm_process import attempt, disk, result

from foreword.referee.models import EMBEDDINGS, IMAGES, KINDS, Kind, fresh_prompts

_MADE = {**KINDS, EMBEDDINGS.name: EMBEDDINGS, IMAGES.name: IMAGES}
Change = Callable[[Path], None]


@dataclass(frozen=True)
class Server:
    """A vLLM: its arguments over the kind's, a change of the model's folder, variables, and a plant (`vllm_plants.py`).

    Attributes:
        extra: settings of the connector beside the stores.
        many: the connector stands before another one with its own store, and one of vLLM's, in a MultiConnector.
    """

    llm: dict[str, Any] = field(default_factory=dict)
    folder: Change | None = None
    environment: dict[str, str] = field(default_factory=dict)
    plant: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    kv_bytes: int = 64 << 20
    many: bool = False


@dataclass(frozen=True)
class Pair:
    """Two servers with the same kind of model.

    Attributes:
        equal: they compute the same KV, and lay it out in the same way.
        why: words that the log of the second server has to have.
    """

    name: str
    equal: bool
    first: Server = field(default_factory=Server)
    second: Server = field(default_factory=Server)
    kind: str = "Llama"
    why: str = ""


# Changes of a folder


def config(**keys: Any) -> Change:
    """Other keys in config.json; None removes a key."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        found = {**json.loads(file.read_text(encoding="utf-8")), **keys}
        file.write_text(json.dumps({key: one for key, one in found.items() if one is not None}), encoding="utf-8")

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], None], *files: str, keep: bool = False) -> Change:
    """Changed weights in these files, in equal parts; those before are removed unless kept."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        if not keep:
            (folder / "model.safetensors").unlink()
        names, where = sorted(tensors), {}
        for number, file in enumerate(files):
            part = {name: tensors[name].contiguous() for name in names[number :: len(files)]}
            where |= dict.fromkeys(part, file)
            if file.endswith(".safetensors"):
                save_file(part, folder / file, metadata={"format": "pt"})
            else:
                torch.save(part, folder / file)
        if len(files) > 1 and files[0].endswith(".safetensors"):
            index = {"metadata": {}, "weight_map": where}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    return apply


def same(tensors: dict[str, torch.Tensor]) -> None:
    """Leave the weights as they are."""


def scaled(pattern: str, factor: float, rows: slice | None = None) -> Callable[[dict[str, torch.Tensor]], None]:
    """Scale the tensors whose names have this in them, or some of their rows."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        matching = [name for name in tensors if pattern in name]
        assert matching, pattern
        for name in matching:
            tensors[name] = tensors[name].clone()
            tensors[name][slice(None) if rows is None else rows] *= factor

    return change


def export(tensors: dict[str, torch.Tensor]) -> None:
    """The model alone, as AutoModel saves it: no head, no `model.` before the names."""
    for name in list(tensors):
        value = tensors.pop(name)
        if name.startswith("model."):
            tensors[name.removeprefix("model.")] = value


def beside(name: str, size: int = 4_096) -> Change:
    """Another file in the folder, with random bytes."""
    return lambda folder: (folder / name).write_bytes(np.random.default_rng(1).bytes(size)) and None


ONE = "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_POOLING = {"runner": None, "convert": None}
_TINY = {"max_num_batched_tokens": 64, "block_size": 128}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.05 * n for n in range(16)], "long_factor": [1.0 + n for n in range(16)],
}  # fmt: skip
_LONG_CONFIG = config(rope_parameters=_LONG, original_max_position_embeddings=512, max_position_embeddings=2_048)
_NO_HYBRID = Server({"disable_hybrid_kv_cache_manager": True})
_ENCODER = Server({"ec_transfer_config": {
    "ec_connector": "ForewordECConnector", "ec_connector_module_path": "foreword.integrations.vllm", "ec_role": "ec_both",
    "ec_connector_extra_config": {"store": ["disk:///{folder}/outputs?size=64MiB"]},
}})  # fmt: skip
_EIGHT_BITS = {"kv_cache_dtype": "fp8"}


def _pair(name: str, second: Server, first: Server | None = None, *, equal: bool, kind: str = "Llama") -> Pair:
    return Pair(name, equal, first or Server(), second, kind)


def _equal(name: str, second: Server, first: Server | None = None, kind: str = "Llama") -> Pair:
    return _pair(name, second, first, equal=True, kind=kind)


def _other(name: str, second: Server, first: Server | None = None, kind: str = "Llama", why: str = "") -> Pair:
    return replace(_pair(name, second, first, equal=False, kind=kind), why=why)


PAIRS = [
    _equal("the same", Server()),
    _equal("served name, lengths, batch sizes", Server({
        "served_model_name": "another", "max_model_len": 1_024, "max_num_seqs": 4, "max_num_batched_tokens": 1_024,
    })),
    _equal("memory", Server(kv_bytes=96 << 20)),
    _equal("eos_token_id", Server(folder=config(eos_token_id=[2, 5], pad_token_id=7, bos_token_id=1))),
    _equal("names and generation in config.json", Server(folder=config(
        id2label={"0": "a"}, temperature=0.5, max_length=99, transformers_version="9", _name_or_path="elsewhere",
    ))),
    _equal("a default that is spelled out", Server(folder=config(attention_bias=False, mlp_bias=False))),
    _equal("a longer table of positions", Server(folder=config(max_position_embeddings=4_096))),
    _equal("generation_config", Server({"override_generation_config": {"temperature": 0.1}}, beside("generation_config.txt"))),
    _equal("kv_cache_dtype spelled out", Server({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}),
           Server({"dtype": "bfloat16"})),
    _equal("auto behind kv_cache_dtype", Server({"dtype": "bfloat16"}),
           Server({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"})),
    _equal("two shards", Server(folder=weights(same, *SHARDS))),
    _equal("*.bin", Server(folder=weights(same, "pytorch_model.bin"))),
    _equal("*.pt, load format pt", Server({"load_format": "pt"}, weights(same, "model.pt", keep=True))),
    _equal("load format safetensors", Server({"load_format": "safetensors"})),
    _equal("files beside the weights", Server(folder=beside("training_args.bin"))),
    _equal("another *.bin beside safetensors", Server(folder=weights(scaled("q_proj", 1.5), "old.bin", keep=True))),
    _equal("another head", Server(folder=weights(scaled("lm_head", 1.25), ONE))),
    _equal("another last norm", Server(folder=weights(scaled("model.norm.", 1.25), ONE))),
    _equal("generating behind embedding", Server(_POOLING), kind=EMBEDDINGS.name),
    _equal("generating behind an exported embedding model", Server(_POOLING),
           Server(folder=weights(export, ONE)), kind=EMBEDDINGS.name),
    # Without the hybrid manager a block has all layers of all tokens. With it, blocks of windows have some layers, and only
    # those before a position from which requests continue are saved.
    _other("hybrid manager off behind on", _NO_HYBRID, kind="Gemma 3", why="KV cache groups"),
    _other("hybrid manager on behind off", Server(), _NO_HYBRID, "Gemma 3", why="KV cache groups"),
    _equal("no hybrid manager", _NO_HYBRID, _NO_HYBRID, "Gemma 3"),
    _other("another block size", Server({"block_size": 64}), why="tokens of a block (--block-size) are 64, 32"),
    _equal("encoder outputs in stores behind none", _ENCODER, kind=IMAGES.name),
    _equal("none behind encoder outputs in stores", Server(), _ENCODER, IMAGES.name),
    _equal("behind a MultiConnector", Server(many=True)),
    _equal("drafts by n-grams", Server({"speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
    }})),
    _equal("unmeasured, trusted", Server(_TINY, extra={"trust_unmeasured": True}),
           Server(_TINY, extra={"trust_unmeasured": True})),
    _other("RoPE base", Server({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}})),
    _other("epsilon in config.json", Server(folder=config(rms_norm_eps=1e-2))),
    _other("window", Server(folder=config(sliding_window=256)), kind="Mistral"),
    _other("no window", Server(folder=config(sliding_window=None)), kind="Mistral"),
    _other("chunk of attention", Server(folder=config(attention_chunk_size=512)), kind="Llama 4"),
    _other("scale of attention", Server(folder=config(query_pre_attn_scalar=64)), kind="Gemma 3"),
    _other("length where RoPE depends on it", Server({"max_model_len": 512}, _LONG_CONFIG), Server(folder=_LONG_CONFIG),
           "Phi-3"),
    _other("dtype", Server({"dtype": "bfloat16"})),
    _other("KV in 8 bits", Server(_EIGHT_BITS)),
    _other("weights of one layer", Server(folder=weights(scaled("layers.2.self_attn.v_proj", 1.01), ONE))),
    _other("embeddings of a few tokens", Server(folder=weights(scaled("embed_tokens", 1.5, slice(0, 40)), ONE))),
    _other("load format pt, other values", Server({"load_format": "pt"}, weights(scaled("_proj", 1.3), "model.pt", keep=True))),
    _other("*.pt changed for a few tokens", Server({"load_format": "pt"}, weights(
        scaled("embed_tokens", 1.5, slice(0, 40)), "model.pt", keep=True,
    )), Server({"load_format": "pt"}, weights(same, "model.pt", keep=True))),
    _other("a plug-in's load format", Server({"load_format": "planted"}, plant="load_format")),
    _other("model implementation", Server({"model_impl": "transformers"})),
    _other("a plug-in that changes a norm", Server(plant="norms")),
    _other("a plug-in that turns positions otherwise", Server(plant="rope_base")),
    _other("environment: precision of products", Server(environment={"VLLM_FLOAT32_MATMUL_PRECISION": "medium"})),
    _other("unmeasured: short steps", Server(_TINY), Server(_TINY)),
    _other("unmeasured: short steps, load format pt", Server({"load_format": "pt", **_TINY}, weights(
        scaled("_proj", 1.3), "model.pt", keep=True,
    )), Server(_TINY)),
    # No server lacks room for the probe alone: vLLM 0.32 does not start without the blocks of its longest prompt.
    _other("unmeasured behind measured", Server(_TINY), Server({"max_num_batched_tokens": 512, "block_size": 128})),
]  # fmt: skip
# A pair of each class, for every run of the slow tests.
FEW = (
    "eos_token_id", "kv_cache_dtype spelled out", "two shards", "generating behind embedding", "behind a MultiConnector",
    "another last norm", "*.pt changed for a few tokens", "unmeasured: short steps, load format pt",
    "a plug-in that changes a norm", "window", "hybrid manager on behind off", "encoder outputs in stores behind none",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Findings of the second server of a pair.

    Attributes:
        found: tokens of its prompts.
        expected: tokens that it finds of its own KV.
        wrong: answers that differ from those of the second server alone.
        why: what its log says about KV that it does not use.
    """

    found: int
    expected: int
    wrong: int
    why: str

    def right(self, pair: Pair) -> bool:
        found = self.found >= 0.95 * self.expected > 0 if pair.equal else not self.found
        return found and not self.wrong and pair.why in self.why


class Bench:
    """Runs pairs in a folder. What a server alone gives, and what it writes, is computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Any, Path]] = {}

    def model(self, kind: Kind, change: Change | None, name: str) -> Path:
        plain = self._folder / "models" / kind.name.replace(" ", "-")
        if not plain.exists():
            kind.build(plain, 3)
        if change is None:
            return plain
        changed = self._folder / "models" / f"{plain.name}-{name}"
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(plain, changed)
        change(changed)
        return changed

    def serve(self, kind: Kind, server: Server, model: Path, store: Path | None, passes: list[str]) -> tuple[Any, str]:
        """Starts a server in a process of its own; returns its answers and its log."""
        llm = {key: one for key, one in {**kind.arguments(), **server.llm}.items() if one is not None}
        longest = min(300, llm["max_model_len"] - 40)
        llm = json.loads(json.dumps(llm).replace("{folder}", str(self._folder).lstrip("/")))
        passes = ["embed" if one == "ask" and llm.get("runner") == "pooling" else one for one in passes]
        job = {
            "model": str(model), "llm": llm, "prompts": fresh_prompts(3, 4, longest - 28), "kv_bytes": server.kv_bytes,
            "extra": server.extra, "many": str(self._folder / "many") if server.many else "",
            "runs": [{"store": None if store is None else [disk(store)], "passes": passes}],
            **({"plant": server.plant} if server.plant else {}),
        }  # fmt: skip
        done = attempt("vllm_kinds_script.py", job, **server.environment)
        [found] = result(done)["results"]
        return found, done.stderr

    def run(self, pair: Pair) -> Outcome:
        kind = _MADE[pair.kind]
        first, second = (
            self.model(kind, one.folder, f"{pair.name.replace('/', '-')}-{number}")
            for number, one in enumerate((pair.first, pair.second))
        )
        written = self._written(kind, pair.first, first)
        store = self._folder / "store"
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(written, store)
        found, log = self.serve(kind, pair.second, second, store, ["ask", "forget", "ask"])
        behind, own = found["answers"]
        cached = sum(one["cached"] for one in behind)
        wrong = 0
        if cached or not pair.equal:
            alone, _ = self.serve(kind, pair.second, second, None, ["ask"])
            wrong = sum(one["tokens"] != two["tokens"] for one, two in zip(behind, alone["answers"][0], strict=True))
        why = dict.fromkeys(line.partition("Foreword: ")[2] for line in log.splitlines() if "Foreword: " in line)
        return Outcome(cached, sum(one["cached"] for one in own), wrong, "; ".join(why))

    def _written(self, kind: Kind, server: Server, model: Path) -> Path:
        """The store behind a server."""
        key = f"{kind.name}{server}"
        if key not in self._known or server.folder is not None:
            store = self._folder / f"written-{len(self._known)}"
            shutil.rmtree(store, ignore_errors=True)
            self._known[key] = self.serve(kind, server, model, store, ["ask", "forget"])[0], store
        return self._known[key][1]


def main(names: list[str]) -> int:
    chosen = [one for one in PAIRS if not names or any(name in one.name for name in names)]
    wrong = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        bench = Bench(Path(folder))
        print("| pair | KV | found of | wrong | log |\n|---|---|---|---|---|", flush=True)
        for pair in chosen:
            try:
                outcome = bench.run(pair)
            except AssertionError as error:
                failed += 1
                print(f"| {pair.name} | FAILED {str(error)[-1500:]} |", flush=True)
                continue
            failed += not outcome.right(pair)
            wrong += outcome.wrong
            mark, kv = "" if outcome.right(pair) else "**", "equal" if pair.equal else "other"
            print(
                f"| {mark}{pair.name}{mark} | {kv} | {outcome.found} of {outcome.expected} | {outcome.wrong} | {outcome.why} |",
                flush=True,
            )
    print(f"\n{len(chosen)} pairs, {failed} not as they have to be, {wrong} wrong answers")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
