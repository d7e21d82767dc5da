"""The generated pages of the reference."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer.main

from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.messages import MessagesBody
from foreword.api.dialects.responses import ResponsesBody
from foreword.api.dialects.sampling import UNSUPPORTED
from foreword.cli.flags import config_flags
from foreword.cli.main import app

ROOT = Path(__file__).parents[1]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
WRITTEN = {path.relative_to(ROOT).as_posix(): text for path, text in GENERATE["pages"]().items()}


@pytest.mark.extended
@pytest.mark.parametrize("page", WRITTEN)
def test_reference_is_up_to_date(page: str) -> None:
    """The pages about commands, configuration, benchmarks, routes and files, and README, are what `python docs/generate.py`
    writes."""
    assert (ROOT / page).read_text(encoding="utf-8") == WRITTEN[page], "run: python docs/generate.py"


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_fields_of_requests_are_documented(kind: type[Any]) -> None:
    """The page about requests names every field that a dialect reads, except those that it only refuses or ignores."""
    page = (ROOT / "docs" / "reference" / "requests.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", page))))
    quiet = {*UNSUPPORTED, "model", "parallel_tool_calls", "service_tier", "safety_identifier", "mcp_servers"}
    assert not set(kind.__struct_fields__) - named - quiet


# Flags of other programs that the pages name: vLLM, SGLang, LMCache, llama.cpp, mdadm, benchmarks, and every command's own.
FOREIGN = """
--data-parallel-size --disable-hybrid-kv-cache-manager --enable-lora --enable-prompt-tokens-details --enforce-eager
--gpu-memory-utilization --hf-overrides --kv-cache-dtype --kv-events-config --kv-offloading-backend --kv-offloading-size
--load-format --max-num-batched-tokens --middleware --mm-processor-cache-type --model-impl --otlp-traces-endpoint
--scheduling-policy --shutdown-timeout --enable-prefix-caching --no-enable-prefix-caching --kv-transfer-config
--ec-transfer-config --max-model-len --prefix-caching-hash-algo
--enable-metrics --hicache-host-memory-mode --hicache-storage-backend-extra-config --hicache-storage-prefetch-policy
--hicache-storage-backend --lora-paths --trust-mm-content-hashes --share
--l1-size-gb --slot-save-path --level --processor-time --hold --help --help-all
"""


def unknown_settings(text: str) -> set[str]:
    """Flags and configuration keys that a page names as code, and that neither Foreword nor another program has."""
    flags, commands = set(FOREIGN.split()), [typer.main.get_command(app)]
    for command in commands:
        flags |= {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        commands += getattr(command, "commands", {}).values()
    keys = {f"{flag.section}.{flag.key}" for flag in config_flags()}
    sections = {key.partition(".")[0] for key in keys}
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```", "", text))
    named = {
        flag
        for span in spans
        if span.startswith(("--", "foreword "))
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    }
    dotted = {key for span in spans for key in re.findall(r"^([a-z]+\.[a-z_]+)(?=$| ?=)", span)}
    return (named - flags) | {key for key in dotted if key.partition(".")[0] in sections and key not in keys}


@pytest.mark.extended
@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_settings_on_pages_exist(page: Path) -> None:
    """Each flag and configuration key that a page names exists. `values.yaml` has a router's `args`, `router.py` is a file; the
    `store` of Transformers' guide is an object."""
    unknown = unknown_settings(page.read_text(encoding="utf-8"))
    assert not unknown - {"router.args", "router.py", "store.lookups", "store.not_used"}


def test_unknown_settings_are_found() -> None:
    """A flag and a key that do not exist are named, those that do are not."""
    text = "`--staging`, `foreword serve --stor x`, `store.stagin`, `store.staging`, `--store-staging`, `--enable-lora`"
    assert unknown_settings(text) == {"--staging", "--stor", "store.stagin"}
