"""`foreword audit`: look at the report of a hit whose KV was wrong, and compute it again."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.blocks.prefix_cache import HOLE
from foreword.cli.commands import described
from foreword.errors import BadRequest, reason_of

File = Annotated[Path, typer.Argument(metavar="FILE", help="A report from the folder of --audit-reports.")]
_LARGEST = 1 << 30


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Reports of hits whose KV was wrong.")
    group.command("show", **described("audit show reports/audit-1764000000-0f3a.json"))(show)
    group.command("rerun", **described("audit rerun reports/audit-1764000000-0f3a.json"))(rerun)
    app.add_typer(group, name="audit")


def show(file: File) -> None:
    """Print what a report says: the block, where it came from, and how much it differs."""
    report = _read(file)
    model = report["model"]
    print(f"model    {model['name']} ({model['fingerprint'][:16]}), {model['dtype']} on {model['device']}")
    print(
        f"block    {report['block']} of {len(report['keys'])}, {model['block_size']} tokens each, group {report['group']}"
    )
    print(f"key      {report['keys'][-1]}")
    print(f"source   {report['source']}")
    print(f"prompt   {report['prompt_tokens']} tokens, SHA-256 {report['prompt_sha256']}")
    print(f"evidence {'tokens and KV' if 'tokens' in report else 'none (--audit-evidence)'}")
    print(f"distance of the cached KV from the computed one; up to {report['tolerance']:g} is rounding")
    _print_layers(report["layers"])


def rerun(
    file: File,
    model: Annotated[
        str | None, typer.Option("--model", help="Folder of the model; by default the embedded one.")
    ] = None,
) -> None:
    """Compute a report's block again, without any cache, and compare it with the KV that was cached.

    Exit status 1 if they differ. Needs a report with evidence.
    """
    report = _read(file)
    if "tokens" not in report:
        raise BadRequest(f"{file} has no evidence; start the server with --audit-evidence")
    layers = _recompute(report, model)
    _print_layers(layers)
    for one in layers:
        print(
            f"the cached KV of layer {one['layer']} is closest to that of layer {one['like'][0]}, block {one['like'][1]}"
        )
    if any(max(one["keys"], one["values"]) > report["tolerance"] for one in layers):
        raise typer.Exit(1)


def _recompute(report: dict[str, Any], model: str | None) -> list[dict[str, Any]]:
    """Compute the prompt from its start. For each layer of the block that was cached: its distance from the computed one, and
    the layer and block of the prompt that it is closest to."""
    from foreword.engine.attention.kv_tensors import distances, split_block
    from foreword.engine.request import Request, SamplingParams
    from foreword.engine.sequence import SequenceState
    from foreword.engine_config import EngineConfig
    from foreword.entrypoints.build_engine import build_engine

    described = report["model"]
    exact = report["tolerance"] == 0.0  # only the audit of a batch-invariant engine has no tolerance
    given: dict[str, Any] = {name: described[name] for name in ("dtype", "block_size")}
    parts = build_engine(EngineConfig(model=model, **given, batch_invariant="on" if exact else "off"))
    if parts.info.fingerprint != described["fingerprint"]:
        raise BadRequest(f"the report is about {described['name']}, whose weights are not those of {parts.info.name}")
    layers = parts.runner.group_layers(report["group"])
    cached = split_block(b64decode(report["found"]), layers)
    compared: list[dict[str, Any]] = []

    def compare(sequence: SequenceState) -> None:
        blocks = sequence.table.groups[report["group"]]
        kept = [number for number, block in enumerate(blocks) if block != HOLE]
        for layer, found in cached.items():
            each = {other: distances(kv, [blocks[number] for number in kept], found) for other, kv in layers.items()}
            keys, values = each[layer][:, kept.index(report["block"])].tolist()
            near = {other: one.amax(0).min(0) for other, one in each.items()}
            like = min(near, key=lambda other: float(near[other].values))
            best = kept[int(near[like].indices)]
            compared.append({"layer": layer, "keys": keys, "values": values, "like": (like, best)})

    request = Request("rerun", tuple(report["tokens"]), SamplingParams(max_tokens=0))
    parts.core.add(request, compare)
    while parts.core.has_work():
        parts.core.step()
    return compared


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LARGEST:
            raise BadRequest(f"{file} is too large for a report")
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(report, dict):
            raise BadRequest(f"{file} is not the report of an audit: it is no object")
        if report["format"] != 1:
            raise BadRequest(f"{file} has the format {report['format']}; this version reads 1")
    except ValueError:
        raise BadRequest(f"{file} is not the report of an audit: it is not JSON") from None
    except (OSError, KeyError, TypeError) as error:
        raise BadRequest(f"{file} is not the report of an audit: {reason_of(error)}") from error
    return report


def _print_layers(layers: list[dict[str, Any]]) -> None:
    print(f"{'layer':>7} {'keys':>9} {'values':>9}")
    for one in layers:
        print(f"{one['layer']:>7} {one['keys']:>9.2g} {one['values']:>9.2g}")
