"""Mistakes in options are told before anything slow begins: each is one sentence and status 2, before torch is imported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from vllm_stub import stubbed_vllm

from foreword.engine import preflight
from foreword.errors import ForewordError, ModelUnsupported
from foreword.store_config import StoreConfig

# Reads a list of arguments and runs the command with them in a fork, so that everything but the check is imported once.
_RUNNER = """
import functools, gc, io, json, os, signal, sqlite3, sys, tempfile
import foreword.router.process, foreword.server.process, pydantic.fields, pydantic.type_adapter, pydantic.types, redis
import typer.main
from foreword.cli import main as cli

# The commands are made from their functions once: this takes longer than what follows.
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(cli.app)
gc.freeze()

def result(arguments):
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            signal.alarm(60)
            for number in (1, 2):
                os.dup2(said.fileno(), number)
            sys.argv = ["foreword", *arguments]
            try:
                cli.main()
            except SystemExit as end:
                status = end.code
            except BaseException as error:
                status = repr(error)
            sys.stderr.flush()
            slow = [name for name in ("torch", "transformers") if name in sys.modules]
            print(json.dumps([status, slow]), flush=True)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        said.seek(0)
        *lines, last = said.read().splitlines() or [""]
        return {"lines": lines, "ended": json.loads(last) if ended == 0 else f"signal {ended}: {last}"}

for line in sys.stdin:
    print(json.dumps(result(json.loads(line))), flush=True)
"""

SERVE = [
    # Model and device
    ("{folder}/none", "'{folder}/none' is not a folder with a model"),
    ("none", "give a folder, or a hub name such as owner/name"),
    ("{folder}/empty", "the folder has no config.json"),
    ("{folder}/broken", "config.json is no JSON: Expecting"),
    ("{folder}/listed", "config.json is no JSON object"),
    ("{folder}/unnamed", "has no model_type"),
    ("{folder}/unknown", "does not know. Did you mean 'qwen3'"),
    ("{folder}/translator", "is an encoder-decoder model"),
    ("--device cuda", "engine.device is cuda"),
    ("--device gpu", "engine.device must be auto, cpu, cuda or cuda:N, not 'gpu'"),
    ("--dtype f16", "engine.dtype must be auto, float32, bfloat16 or float16"),
    ("--kernels fast", "engine.kernels must be"),
    ("--quantization int4", "engine.quantization must be"),
    # Sizes
    ("--kv-memory 4GB2", "engine.kv_memory (--kv-memory) is '4GB2'; write auto"),
    ("--kv-memory", "many tokens", "write auto, a size such as 4GiB, or a number of tokens"),
    ("--linear-memory lots", "engine.linear_memory (--linear-memory): 'lots' is not a size"),
    ("--block-size 0", "engine.block_size must be at least 1"),
    ("--max-model-len 1", "engine.max_model_len must be at least 2"),
    ("--store-staging x", "store.staging (--store-staging)"),
    ("--max-body 1MX", "server.max_body (--max-body)"),
    ("--prefix-budget 99%", "prefixes.budget must be between 0% and 90%"),
    ("--response-memory x", "--response-memory"),
    # Stores
    ("--store dsk:///x", "unknown store type 'dsk'. Did you mean 'disk'"),
    ("--store {folder}/x", "is not the URL of a store"),
    ("--store disk://{folder}/x?sise=1GiB", "unknown option 'sise'. Did you mean 'size'?"),
    ("--store disk://{folder}/x?size=1GX", "'1GX' is not a value for 'size'"),
    ("--store disk://{folder}/x?pin_share=2", "foreword: pin_share is from 0 to 1, not 2.0"),
    ("--store disk://{folder}/x?size=0", "no disk store of 0 bytes"),
    ("--store disk://{folder}/x?journal=none", "is wal or delete, not 'none'"),
    ("--store disk://{folder}/x?tenant_quota=200%", "tenant_quota is from 1 byte"),
    ("--store disk://host/x", "names a host"),
    ("--store disk://{folder}/x,/y", "make one file system of several disks with LVM, md or btrfs"),
    ("--store disk:", "a disk store needs a folder"),
    ("--store disk://{folder}/file/x", "cannot be created: Not a directory"),
    ("--store disk:///proc/x", "the folder /proc/x cannot be created"),
    ("--store disk://{folder}/none?read_only=1", "there is no folder"),
    ("--store disk://{folder}/x?codec=zip", "There is no codec 'zip'"),
    ("--store disk://{folder}/x?admit=third", "admit is one of every, second, prompts"),
    ("--store memory://?codec=lossless", "remove codec=lossless"),
    ("--store memory://?size=0", "no memory store of 0 bytes"),
    ("--store memory://?size=1GiB&pin_share=1.5", "pin_share is from 0 to 1, not 1.5"),
    ("--store memory://?size=900TiB", "more than this machine's memory"),
    ("--kv-memory 900TiB", "more than this machine's memory"),
    ("--store s3://bucket?endpoint=http://", "endpoint= takes a URL"),
    ("--store rediss://127.0.0.1:1?ssl_ca_certs={folder}/none.pem", "there is no file {folder}/none.pem"),
    ("--store redis://127.0.0.1:1?retry=x&foo=1", "unknown option 'foo'"),
    ("--store redis://a,b", "several hosts need the scheme redis+cluster://"),
    ("--store redis://127.0.0.1?ttl=soon", "'soon' is not a value for 'ttl'"),
    ("--store s3://bucket?chunk=1000", "chunk is from 1 to"),
    ("--store s3://bucket?regin=x", "'regin'"),
    ("--store file://{folder}/x?sise=1", "a folder has no options"),
    ("--store peer://10.0.0.7:9100", "secret"),
    ("--store peer://somewhere", "peer://host:port"),
    ("--store memory:// --no-enable-prefix-caching", "needs prefix caching"),
    ("--store disk://{folder}/x?codec=int8 --batch-invariant on", "needs stores without a lossy codec"),
    ("--store-integrity-secrets short", "ID:SECRET"),
    # The server
    ("--port 99999", "server.port must be between 0 and 65535"),
    ("--host no.such.host.invalid", "it is not an address of this machine (--host)"),
    ("--prot 9000", "--port"),
    ("--config {folder}/none.toml", "cannot read the configuration file"),
    ("--config {folder}/broken.toml", "is not valid TOML"),
    ("--config {folder}/unknown.toml", "unknown configuration key server.prot. Did you mean 'port'"),
    ("--log-level loud", "server.log_level must be"),
    ("--api-key-file {folder}/none", "{folder}/none"),
    ("--tenant-secret short", "at least 16 characters"),
    ("--api-keys a=1234567890123456 --store disk://{folder}/x", "set --tenant-secret"),
    ("--quota", "* tokens=many", "tokens=many"),
    ("--peer http://a/b", "peer"),
    ("--tool-parser hermes3", "unknown tool parser 'hermes3'. Did you mean 'hermes'"),
    ("--reasoning-parser thought", "unknown reasoning parser 'thought'"),
    ("--kv-events nonsense", "--kv-events"),
    ("--kv-events tcp://127.0.0.1:99999", "there is no port 99999"),
    (
        "--kv-events tcp://0.0.0.0:0",
        "other hosts can read the token ids of all prompts at tcp://0.0.0.0:0 (--kv-events)",
    ),
    ("--kv-events tcp://*:5557", "set --router-key, which encrypts them"),
    ("--record {folder}/none/trace.jsonl", "{folder}/none/trace.jsonl"),
    ("--audit-reports {folder}/file/reports", "cannot be created: Not a directory"),
    # Transfers
    ("--role both --transfer-bind 0.0.0.0:0", "set transfer.advertise (--transfer-advertise)"),
    ("--role both --transfer-bind 10.0.0.1:1", "set --transfer-secret-file"),
    ("--transfer-secret-file {folder}/none", "cannot read transfer.secret from {folder}/none"),
    ("--role both --transfer-tls --transfer-secret aaaaaaaaaaaaaaaaaaaa", "needs a certificate"),
    ("--transfer-ring 1KiB", "transfer.ring must be at least 64KiB"),
    ("--role leader", "server.role must be prefill, decode or both"),
    ("--transfer-bind unix:{folder}/none/socket --role both", "there is no folder {folder}/none"),
    ("--transfer-tls-certificate-file {folder}/none", "needs transfer.tls"),
    # Keys that can be guessed, where other hosts can try
    (
        "--host 0.0.0.0 --admin-key short",
        "server.admin_key must have at least 16 characters where other hosts can connect",
    ),
    ("--host 0.0.0.0 --router-key short", "server.router_key must have at least 16 characters"),
    ("--host :: --api-keys alice=sk-1", "each API key must have at least 16 characters"),
    # Numbers
    ("--kv-memory", "0 tokens", "engine.kv_memory (--kv-memory) is '0 tokens'"),
    ("--kv-memory 0", "engine.kv_memory (--kv-memory) is '0'"),
    ("--drain-seconds -5", "server.drain_seconds must be 0 or more"),
    ("--drain-seconds nan", "server.drain_seconds must be 0 or more"),
    ("--keep-alive inf", "server.keep_alive must be more than 0, not inf"),
    ("--store-flush-seconds -1", "store.flush_seconds must be 0 or more"),
    ("--max-body 0", "server.max_body (--max-body) must be at least one byte"),
    ("--store-staging 0", "must have room for a block"),
    ("--threads 0", "engine.threads must be at least 1"),
    ("--threads 100000", "and this machine has"),
    ("--allowed-origins https://chat.example.org/", "is not an origin"),
    ("--prefix-retain-tenant-share nan", "prefixes.retain_tenant_share must be between"),
    # More of stores
    ("--store redis+cluster://", "a cluster URL names hosts: redis+cluster://host1,host2"),
    ("--store redis+cluster://:6379", "a cluster URL names hosts"),
    ("--store rediss+sentinel:///name", "a sentinel URL names hosts: rediss+sentinel://host1,host2/name"),
    ("--store redis://host/x", "ends with the number of a database, not 'x'"),
    ("--store s3://bucket?endpoint=nonsense", "endpoint= takes a URL"),
    ("--store memory:///path", "names a path"),
    ("--store memory://?label=", "label= takes a name"),
    ("--store disk://{folder}/x?size=1GiB&size=2GiB", "has an option twice"),
    ("--store disk://{folder}/x --store disk://{folder}/x", "is given twice"),
    ("--store file://host/x", "names a host"),
    ("--store file://", "needs the folder"),
    ("--store peer://127.0.0.1:0", "has no port at which an instance could listen"),
    # Options that belong together
    ("--quota", "a requests=1", "--quota", "a tokens=2", "there are two quotas of 'a'"),
    ("--peer unix:folder", "unix:/FOLDER"),
    ("--admin-key file:{folder}/none", "cannot read server.admin_key from {folder}/none: No such file or directory"),
    ("--store-integrity-secrets file:{folder}/nothing", "the file is empty"),
    ("--store disk://{folder}/open", "every user can put blocks into the folder {folder}/open: chmod o-w"),
    ("--store file://{folder}/open", "every user can put blocks into the folder {folder}/open: chmod o-w"),
    ("--store disk://{folder}/x?owner=you", "'you' is not a value for 'owner'"),
    ("--store disk://{folder}/x?tenant_quota=nan%", "'nan%' is not a value for 'tenant_quota'"),
    ("--store redis://127.0.0.1?ttl=nan", "'nan' is not a value for 'ttl'"),
    ("--store redis://127.0.0.1?ttl=1e300", "ttl is at least a millisecond and at most"),
    ("--store s3://bucket?touch=1e999", "'1e999' is not a value for 'touch'"),
    ("--store disk://{folder}/x%00", "has a character that no URL has"),
    ("--store disk://{folder}/x?hold=1GiB", "hold needs a faster tier"),
    ("--store disk://{folder}/x --store disk://{folder}/./x/", "disk://{folder}/x is given twice"),
    ("--store ", "--store is empty: give it a value, or leave it out"),
    ("--api-keys ", "--api-keys is empty"),
    ("--admin-key ", "--admin-key is empty"),
    ("--api-key-file {folder}/nothing", "{folder}/nothing: the file is empty"),
    ("--quota alice", "write TENANT and any of requests=N"),
    ("--api-keys", "alice=AAAA", "--quota", "alcie requests=1", "no API key is of this tenant. Did you mean 'alice'?"),
    ("--kv-events tcp://127.0.0.1", "--kv-events is written tcp://HOST:PORT"),
    ("a/b/c", "'a/b/c' is not a folder with a model; give a folder, or a hub name"),
    ("", "", "MODEL is empty"),
    ("--peer host:99999", "'host:99999' is not a peer"),
    ("--kernels triton --device cpu", "engine.kernels is triton, which needs --device cuda"),
    ("--otlp-endpoint http://", "--otlp-endpoint takes a URL"),
    # Values in another unit, place or form
    ("--kv-memory 50", "engine.kv_memory (--kv-memory) is '50'; write auto, a size"),
    ("--store disk://{folder}/x&size=1GiB", "disk://{folder}/x: options begin with '?', so write ?size="),
    ("--store s3:///path", "names no bucket; write s3://BUCKET/PATH"),
    ("--store az://", "names no bucket; write az://BUCKET/PATH"),
    ("--allowed-hosts http://chat.example.org/", "is not the name of a host, such as chat.example.org"),
    ("--allowed-hosts *.example.org", "'*.example.org' is not the name of a host"),
    ("--config {folder}/port.toml", "port must be a table, written [port]"),
    ("--config {folder}/table.toml", "unknown table [sever]. Did you mean 'server'?"),
    ("--config {folder}", "cannot read the configuration file {folder}: Is a directory"),
    ("--record {folder}", "the recording {folder} exists already"),
]
REPLICA = "--replica http://127.0.0.1:1"
ROUTE = [
    ("", "name at least one replica"),
    ("--replica 127.0.0.1:8001", "127.0.0.1:8001"),
    (f"{REPLICA} {REPLICA}", "is named twice"),
    ("--replica", "http://127.0.0.1:1 role=boss", "boss"),
    (f"{REPLICA} --policy best", "unknown policy 'best'"),
    (f"{REPLICA} --tokenizer {{folder}}/none", "{folder}/none"),
    ("--replica-file {folder}/none", "cannot read the replica file"),
    (f"{REPLICA} --prefix-file {{folder}}/file/prefixes", "{folder}/file"),
    (f"{REPLICA} --audit-reports {{folder}}/file/reports", "cannot be created: Not a directory"),
    (f"{REPLICA} --tenant-weight a", "TENANT=WEIGHT"),
    (f"{REPLICA} --picker 9002", "--picker is written HOST:PORT"),
    (
        f"{REPLICA} --picker 127.0.0.1:0 --picker-tls-certificate-file {{folder}}/none",
        "certificate and key: No such file",
    ),
    ("--replica-dns http://user@host:1", "--replica-dns"),
    (f"{REPLICA} --max-attempts 0", "router.max_attempts must be at least 1"),
    (f"{REPLICA} --warm-seconds 1e9", "router.warm_seconds must be between"),
    (f"{REPLICA} --host 0.0.0.0 --admin-key short", "server.admin_key must have at least 16 characters"),
    (f"{REPLICA} --request-timeout inf", "router.request_timeout must be more than 0"),
    ("--replica", "http://127.0.0.1:1 events=nonsense", "events is written tcp://HOST:PORT"),
    ("--replica", "http://127.0.0.1:1 events=tcp://h:99999", "events is written tcp://HOST:PORT"),
    ("--replica", "http://127.0.0.1:1 replay=tcp://h:1", "replay needs events"),
    (f"{REPLICA} --tenant-weight a=1 --tenant-weight a=2", "once each, not 'a=2'"),
    (f"{REPLICA} --tenant-weight =1", "TENANT=WEIGHT"),
    (f"{REPLICA} --picker ", "--picker is empty"),
    ("--prefill http://127.0.0.1:1", "name one that answers, with --replica"),
    (f"{REPLICA} --tenant-weight a=0", "TENANT=WEIGHT, such as team-a=2, once each, not 'a=0'"),
    (f"{REPLICA} --tenant-weight a=nan", "TENANT=WEIGHT"),
    (f"{REPLICA} --tenant-priority a=inf", "TENANT=NUMBER"),
    (f"{REPLICA} --tokenizer {{folder}}/empty", "the folder has no tokenizer.json"),
    (f"{REPLICA} --picker-trusts-headers", "needs router.picker (--picker)"),
    ("--replica http://a:1 --replica http://A:1/", "http://a:1 is named twice"),
    (f"{REPLICA} --workers 1000000", "at most 64"),
]
OTHERS = [
    ("simulate", "{folder}/trace.jsonl --runs 5", "--runs and --jobs need --slo"),
    ("simulate", "{folder}/trace.jsonl --speed nan", "the speed of a trace"),
    ("simulate", "{folder}/trace.jsonl --policy best", "unknown policy 'best'"),
    ("simulate", "{folder}/trace.jsonl --group", "fast replica=1", "replica is not a key"),
    ("simulate", "{folder}/trace.jsonl --change", "10s fail r99", "there is no such replica"),
    ("calibrate", "--out {folder}/none/costs.json", "there is no folder {folder}/none"),
    ("calibrate", "--out {folder}/costs.json --store dsk:///x", "unknown store type 'dsk'"),
    ("simulate", "{folder}/trace.jsonl --out {folder}/none/page.html", "there is no folder {folder}/none"),
    ("explain", "http://127.0.0.1:1 --within nan", "--within is a number of seconds, not nan"),
    ("conform", "--engine --store memory://", "leave out the other options"),
    ("calibrate", "--for 5s", "--for and --api-key are for --metrics"),
    ("conform", "--json-file {folder}/none/x.json", "there is no folder {folder}/none"),
    ("conform", "--folder {folder}/file", "cannot be created: Not a directory"),
    ("forget", "--server http://127.0.0.1:1 disk://{folder}/empty", "leave out the URLs of stores, or --server"),
    ("forget", "--tenant a --tenant-secret short disk://{folder}/empty", "at least 16 characters"),
    ("keys", "rotate --keep nan", "--keep is from 0 to"),
    ("inspect", "redis+cluster://", "a cluster URL names hosts"),
    ("explain", "nonsense", "a server's URL is written http://host:8000"),
    ("explain", "http://", "a server's URL is written http://host:8000"),
    ("explain", "http://127.0.0.1:99999", "a server's URL is written http://host:8000"),
    ("prefix", "list --server nonsense", "a server's URL is written http://host:8000"),
    ("audit", "show {folder}/nothing", "is not the report of an audit: it is not JSON"),
    ("audit", "show {folder}/list.json", "is not the report of an audit: it is no object"),
    ("copy", "disk://{folder}/empty disk://{folder}/empty", "is given twice"),
    ("copy", "disk://{folder}/empty memory://", "name one that outlives it"),
    ("doctor", "--kernels fast", "engine.kernels must be"),
    ("doctor", "--drain-seconds -1", "server.drain_seconds must be 0 or more"),
]
CASES = [("serve", *case) for case in SERVE] + [("route", *case) for case in ROUTE] + OTHERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    (folder / "file").write_text("in the way")
    (folder / "nothing").touch()
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    turn = {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}
    (folder / "trace.jsonl").write_text(json.dumps(turn) + "\n")
    (folder / "broken.toml").write_text("server = \n")
    (folder / "unknown.toml").write_text("[server]\nprot = 1\n")
    (folder / "port.toml").write_text("port = 8000\n")
    (folder / "table.toml").write_text("[sever]\nport = 8000\n")
    (folder / "list.json").write_text("[]")
    configurations = {
        "broken": '{"model_type": "llama",',
        "listed": "[]",
        "unnamed": "{}",
        "unknown": '{"model_type": "qwen33"}',
        "translator": '{"model_type": "t5", "is_encoder_decoder": true}',
    }
    for name, text in configurations.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")}
    environment["COLUMNS"] = "200"
    command = [sys.executable, "-c", _RUNNER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(runner: subprocess.Popen[str], arguments: list[str]) -> dict[str, Any]:
    assert runner.stdin is not None and runner.stdout is not None
    runner.stdin.write(json.dumps(arguments) + "\n")
    runner.stdin.flush()
    found: dict[str, Any] = json.loads(runner.stdout.readline())
    return found


@pytest.mark.parametrize("case", represented(CASES, *CASES[::3]), ids=lambda case: " ".join(case[:-1]))
def test_a_mistake_is_told_at_once(runner: subprocess.Popen[str], folder: Path, case: tuple[str, ...]) -> None:
    """Status 2 and one line that says what is wrong, before torch is imported; nothing is left behind."""
    command, options, *whole, expected = case
    arguments = [command, *(options.split(" ") if options else ()), *whole]
    before = sorted(folder.rglob("*"))
    found = ask(runner, [one.replace("{folder}", str(folder)) for one in arguments])
    assert found["ended"] == [2, []], found
    *usage, line = found["lines"]
    assert expected.replace("{folder}", str(folder)) in line, found
    # The usage that the command line's parser prints before a mistake of its own.
    assert not usage or (usage[0].startswith("Usage: ") and len(usage) <= 3), found
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ("none", "model      'none' is not a folder with a model"),
        ("{folder}/empty", "the folder has no config.json"),
        ("--device cuda", "engine.device is cuda"),
        ("--store dsk:///x", "store      'dsk:///x': unknown store type"),
        ("--store disk://{folder}/x?sise=1", "unknown option 'sise'"),
        ("--store redis+cluster://", "a cluster URL names hosts"),
        ("--role both --transfer-bind nowhere", "options    'nowhere' is not an address"),
        ("--audit-reports {folder}/file/reports", "cannot be created: Not a directory"),
    ],
)
def test_doctor_finds_mistakes_first(runner: subprocess.Popen[str], folder: Path, options: str, finding: str) -> None:
    """`doctor` reports a mistake in the options as one finding, with status 1, and does not go on to what takes seconds."""
    found = ask(runner, ["doctor", "--port", "0", *options.replace("{folder}", str(folder)).split(" ")])
    assert found["ended"] == [1, []], found
    [line] = [line for line in found["lines"] if line.startswith("FAIL")]
    assert finding in line


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"store": 5}, "is a list of URLs, not 5"),
        ({"store": [5]}, "is a list of URLs"),
        ({"store": "dsk:///x"}, "unknown store type 'dsk'"),
        ({"store": "disk://{folder}/x?sise=1"}, "unknown option 'sise'"),
        ({"store": "disk://{folder}/file/x"}, "cannot be created: Not a directory"),
        ({"store": ["memory://", "memory://?size=x"]}, "'x' is not a value for 'size'"),
        ({"store": "redis+cluster://"}, "a cluster URL names hosts"),
        ({"store": "peer://10.0.0.1:9"}, "secret"),
        ({"store": "memory://", "lookup_timeout": -1}, "store.lookup_timeout must be more than 0"),
        (
            {"store": "memory://", "transfer": {"min_tokens": 5}},
            "transfer.min_tokens: it is 64 tokens and cannot be set",
        ),
        ({"store": "memory://", "transfer": {"bind": "0.0.0.0:1"}}, "set transfer.advertise (--transfer-advertise)"),
        ({"store": "memory://", "transfer": {"bind": "10.0.0.1:0"}}, "set --transfer-secret-file"),
        ({"store": "memory://", "transfer": {"advertise": "nowhere"}}, "'nowhere' is not an address"),
    ],
)
def test_mistakes_in_the_connectors_settings(folder: Path, settings: dict[str, Any], reason: str) -> None:
    """vLLM's `kv_connector_extra_config` is checked when vLLM makes the connector, not at the first block."""
    given = json.loads(json.dumps(settings).replace("{folder}", str(folder)))
    with stubbed_vllm():
        from foreword.integrations.vllm.connector_config import ConnectorSettings

        with pytest.raises(ForewordError, match=re.escape(reason)):
            ConnectorSettings.read(given)


@pytest.mark.parametrize("command", ["inspect", "verify", "forget --no-tenant", "verify --repair"])
@pytest.mark.parametrize(
    "url", ["disk://{folder}/typo", "disk://{folder}/empty", "disk:///a/b,/c", "file://{folder}/typo"]
)
def test_a_tool_creates_no_store(runner: subprocess.Popen[str], folder: Path, command: str, url: str) -> None:
    """A tool on a folder that is not there, or that holds no store, says so with status 1 and writes nothing."""
    before = sorted(folder.rglob("*"))
    found = ask(runner, [*command.split(" "), url.replace("{folder}", str(folder))])
    assert found == {"lines": [f"foreword: no store at {url.replace('{folder}', str(folder))}"], "ended": [1, []]}
    assert sorted(folder.rglob("*")) == before and not Path("/a/b").exists()


_LLM = """
import sys
from foreword import LLM, ForewordError
sys.modules["redis"] = sys.modules["obstore"] = None  # as if they were not installed
for options in (
    {"model": "none"},
    {"device": "cuda"},
    {"kv_memory": "4GB2"},
    {"block_sise": 16},
    {"store": "disk:///proc/x"},
    {"store": ["memory://", "dsk:///x"]},
    {"store": "redis://127.0.0.1"},
    {"store": "s3://bucket"},
    {"store": "memory://", "enable_prefix_caching": False},
):
    try:
        LLM(**options)
    except ForewordError as error:
        print(error.message)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_mistakes_of_an_offline_engine() -> None:
    """`LLM(...)` refuses wrong options, and stores whose client is not installed, before it imports torch."""
    done = subprocess.run([sys.executable, "-c", _LLM], capture_output=True, text=True, check=True)
    *said, slow = done.stdout.splitlines()
    assert slow == "[]" and len(said) == 9
    for line, words in zip(
        said,
        (
            "is not a folder with a model",
            "engine.device is cuda",
            "(--kv-memory) is '4GB2'",
            "unknown configuration key engine.block_sise. Did you mean 'block_size'",
            "the folder /proc/x cannot be created",
            "unknown store type 'dsk'",
            "this store needs redis: pip install 'foreword[redis]'",
            "this store needs obstore: pip install 'foreword[s3]'",
            "needs prefix caching",
        ),
        strict=True,
    ):
        assert words in line


def test_a_disk_larger_than_its_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk store that may grow beyond the file system is named in a warning before anything is loaded, also in a folder that
    does not exist yet; one that fits is not."""
    preflight.check_disks(StoreConfig(urls=(f"disk://{tmp_path}/a/b?size=9999TiB", f"disk://{tmp_path}/c?size=1MiB")))
    [line] = [record.getMessage() for record in caplog.records]
    assert f"disk://{tmp_path}/a/b: size=9999TiB is more than its file system has" in line


def test_code_of_a_checkpoint_is_not_judged(folder: Path) -> None:
    """A model type that Transformers does not know is no mistake where the checkpoint brings its own code and may run it."""
    own = folder / "own"
    own.mkdir()
    try:
        (own / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}')
        preflight.check_model(str(own), trust_remote_code=True)
        with pytest.raises(ModelUnsupported, match="model_type 'mine'"):
            preflight.check_model(str(own))
    finally:
        shutil.rmtree(own)
