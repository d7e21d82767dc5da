"""`foreword conform`: check a KV connector of vLLM, a store, or the embedded engine."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.children import ended_by_signals
from foreword.cli.commands import check_file, described
from foreword.config import check_folder
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.referee.check_claims import Plan, Result


def register(app: typer.Typer) -> None:
    """Add the command."""
    examples = ("conform --store 'disk:///tmp/empty?size=1GiB'", "conform --engine --only reuse")
    app.command("conform", **described(*examples))(conform)


def conform(
    *,
    transfer: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-config",
            help="JSON that vLLM takes under this name; by default Foreword's connector with a disk store.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Folder or file where the connector keeps KV. Files in it are damaged; it must be empty or new.",
        ),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Interpreter that has vLLM; by default this one.")] = "",
    engine: Annotated[bool, typer.Option("--engine", help="Check the embedded engine.")] = False,
    store: Annotated[
        str | None, typer.Option("--store", help="Check the backend of this store URL, which must be empty.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Name of a claim, or its start. May be repeated.")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option("--models", help="Kinds of models besides Llama, separated by commas, or `all`."),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Also check the claims that are not in the standard set.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Other seeds give other prompts.")] = 1,
    as_json: Annotated[Path | None, typer.Option("--json-file", help="Write the results to this file.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue a run whose results are in this file.")
    ] = None,
    failures: Annotated[
        Path, typer.Option("--reproducers", help="Folder for scripts that show failures again.")
    ] = Path("conform-failures"),
    matrix: Annotated[
        list[str] | None,
        typer.Option(
            "--matrix",
            metavar="[NAME=]PYTHON",
            help="Interpreter with a release of vLLM; repeat it for each. The table has a column for each release.",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="Write the table of --matrix into this Markdown page, between its marks."),
    ] = None,
) -> None:
    """Check that cached KV gives the answers of a computation.

    Runs a KV connector in a real vLLM with small random models, and compares tokens and log-probabilities with those of vLLM
    alone. Status 1 if a claim fails, or none is shown.
    """
    if matrix and (store is not None or engine or python or folder is not None):
        raise ConfigError("--matrix names interpreters with vLLM; leave out --python, --folder, --engine and --store")
    if page is not None and not matrix:
        raise ConfigError("--page is for the table of --matrix")
    check_file("--json-file", as_json)
    if store is not None:
        if engine or transfer or folder or python or only or models or long or as_json or resume:
            raise ConfigError("--store checks a backend by itself: leave out the other options")
        from foreword.referee.store_claims import check_store

        raise typer.Exit(check_store(store))
    for needed in (failures, folder if engine or transfer is None else None):
        if needed is not None:
            check_folder(str(needed))
    from foreword.referee.check_claims import STANDARD_MODELS, Plan, conform, table
    from foreword.referee.models import KINDS
    from foreword.referee.session import Target, check_modules

    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="foreword-conform-kv-") as made:
        if engine or transfer is None:
            folder = folder or Path(made) / "kv"
        chosen = _transfer(transfer, folder, engine)
        kinds = STANDARD_MODELS if models is None else tuple(KINDS) if models == "all" else _names(models)
        target = Target(chosen, python or sys.executable, folder, engine)
        if not engine and not matrix:
            check_modules(target.python, _modules(chosen))
        only_some = tuple(only or ())
        plan = Plan(target, seed, only_some, kinds, failures, resume or as_json, resume is not None, long)
        if matrix:
            results = _conform_matrix(plan, matrix, page, transfer)
        else:
            results = conform(plan, _say)
            print(table(results))
    failed = [one for one in results if one.result == "FAIL"]
    for one in failed:
        print(f"{one.claim}: run {one.reproducer}")
    print(f"\n{len(results)} claims: {sum(one.result == 'pass' for one in results)} pass, {len(failed)} FAIL")
    raise typer.Exit(1 if failed or not any(one.result == "pass" for one in results) else 0)


def _modules(transfer: dict[str, Any]) -> list[str]:
    """Modules that the interpreter of a connector needs."""
    own = transfer.get("kv_connector_module_path")
    return ["vllm", *([own] if isinstance(own, str) else [])]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _conform_matrix(plan: Plan, matrix: list[str], page: Path | None, transfer: str | None) -> list[Result]:
    """All results, the table printed. Foreword's connector gets a folder of its own in each environment."""
    from foreword.referee.matrix import Environment, conform_matrix, environments, matrix_table, write_page
    from foreword.referee.session import check_modules

    def own(one: Environment) -> dict[str, Any]:
        if plan.target.files is None:
            return {}
        folder = plan.target.files / re.sub(r"[^\w.]+", "-", one.name)
        return {"files": folder, "transfer": _transfer(transfer, folder, False)}

    given = environments(matrix)
    for one in given:
        check_modules(one.python, _modules(_transfer(transfer, plan.target.files, False)))
    found = conform_matrix(plan, given, own, _say)
    print(matrix_table(found))
    if page is not None:
        write_page(page, plan, given, found)
    return [one for some in found.values() for one in some]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _transfer(text: str | None, folder: Path | None, engine: bool) -> dict[str, Any]:
    urls = [f"disk://{folder}?size=1GiB"]
    if engine:
        return {"store": urls}
    if text is None:
        return {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "foreword.integrations.vllm",
            "kv_role": "kv_both",
            # The measure is right answers, not speed.
            "kv_connector_extra_config": {"store": urls, "lookup_timeout": 60, "load_timeout": 120},
        }
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-transfer-config is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("kv_connector"), str):
        raise ConfigError("--kv-transfer-config must be a JSON object with kv_connector")
    return found
