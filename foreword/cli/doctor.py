"""`foreword doctor`: check this machine and a configuration."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer

from foreword import __version__
from foreword.blocks.layout import NAME_BYTES
from foreword.cli.commands import described
from foreword.cli.flags import with_config
from foreword.compiled_code import CannotBuild, processor_flags, system_lines
from foreword.configuration import Config
from foreword.engine_config import EngineConfig
from foreword.errors import ForewordError
from foreword.request_errors import ModelNotFound

_PACKAGES = ("torch", "transformers", "tokenizers", "aiohttp", "prometheus_client")
# Instruction sets that determine how fast a model runs on a CPU.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_GIB = 2**30
_STORE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    topic: str
    text: str
    ok: bool = True


def register(app: typer.Typer) -> None:
    """Add the command."""
    common = ("config", "load", "no-load", "verbose", "device", "dtype", "kv-memory", "host", "port", "store")
    example = "doctor --store 'disk:///var/cache/foreword?size=20GiB'"
    app.command(**described("doctor", example, common=common))(with_config(doctor))


def doctor(
    config: Config,
    *,
    load: Annotated[bool, typer.Option("--load/--no-load", help="Load the model and check that it computes.")] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what was measured to choose the model's kernels.")
    ] = False,
) -> None:
    """Check this machine and this configuration. Status 1 if something would not work."""
    from foreword.engine.preflight import without_collections

    healthy = True
    with without_collections():
        for finding in examine(config, load, verbose):
            healthy &= finding.ok
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.topic:<10} {finding.text}", flush=True)
    raise typer.Exit(0 if healthy else 1)


def examine(config: Config, load: bool, verbose: bool = False) -> Iterator[Finding]:
    """Findings, cheap ones first. `load` also loads the model, which takes time and memory; with `verbose` also what was
    measured to choose its kernels."""
    yield Finding("versions", _versions())
    yield Finding("cores", _cores())
    yield Finding("memory", _memory())
    yield Finding("cpu", _features())
    yield _port(config.server.host, config.server.port)
    stores = [_store(url, config) for url in config.store.urls]
    if config.encryption.key_store is not None:
        stores.append(_keys(config))
    yield from stores
    mistake = _mistake(config)
    if mistake is not None:
        if mistake.text not in (one.text for one in stores):
            yield mistake
        return  # before torch is imported
    yield _kernels(config.engine)
    if load:
        yield from _model(config, verbose)


def _mistake(config: Config) -> Finding | None:
    """The first mistake that `foreword serve` would refuse."""
    from foreword.api.quotas import Quotas
    from foreword.api.rights import Tenants
    from foreword.engine import preflight

    try:
        Tenants.from_config(config.server)
        Quotas.parse(config.server.quotas)
        preflight.check_server(config)
    except ForewordError as error:
        return Finding("model" if isinstance(error, ModelNotFound) else "options", error.message, ok=False)
    return None


def _versions() -> str:
    found = [f"foreword {__version__}", f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
    return ", ".join(found)


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    limit = (
        f", limited to {int(quota[0]) / int(quota[1]):g} by the container"
        if len(quota) == 2 and quota[0] != "max"
        else ""
    )
    return f"{usable} of {os.cpu_count()} usable{limit}"


def _memory() -> str:
    sizes = dict(line.split(":", 1) for line in system_lines("/proc/meminfo") if ":" in line)
    if "MemTotal" not in sizes:
        return "unknown on this system"
    total, available = (int(sizes[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _first_line("/sys/fs/cgroup/memory.max")
    limited = f", limited to {int(limit) / _GIB:.1f} GiB by the container" if limit.isdigit() else ""
    return f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available{limited}"


def _features() -> str:
    flags = processor_flags()
    found = [feature for feature in _FEATURES if feature in flags]
    return f"{platform.machine()}, {' '.join(found) or 'no vector features known'}"


def _kernels(config: EngineConfig) -> Finding:
    """The kernels for this CPU. Compiles them if that has not been done."""
    if config.kernels == "torch":
        return Finding("kernels", "PyTorch's operators (engine.kernels=torch)")
    try:
        from foreword.engine.kernels import native
    except ModuleNotFoundError as error:
        return Finding("kernels", f"PyTorch's operators are needed, but {error.name} is not installed", ok=False)
    try:
        kernels = native.load()
    except CannotBuild as error:
        needed = config.kernels == "native"
        return Finding("kernels", f"PyTorch's operators, which are slower; no native kernels: {error}", not needed)
    used = "for everything" if config.kernels == "native" else "where they measure fastest"
    return Finding("kernels", f"native, compiled for {kernels.lanes * 32}-bit vectors; used {used}")


def _port(host: str, port: int) -> Finding:
    if port == 0:
        return Finding("port", "a free port will be used")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return Finding("port", f"cannot listen on {host} port {port}: {error.strerror}", ok=False)
    return Finding("port", f"{host} port {port} is free")


def _keys(config: Config) -> Finding:
    """Read the master keys, and look whether they decrypt all data keys."""
    from foreword.store.store_keys import encryption

    try:
        with closing(encryption().open(config.encryption)) as keys:
            living, unknown = keys.count()
            text = f"{living} data keys, {unknown} that these master keys do not decrypt; {keys.master} encrypts"
    except ForewordError as error:
        return Finding("keys", error.message, ok=False)
    return Finding("keys", text, ok=not unknown)


def _store(url: str, config: Config) -> Finding:
    """Open a store and ask it for a block that it does not have."""
    from foreword.store.redact import redacted
    from foreword.store.store_keys import keys_of
    from foreword.store.types import Reach
    from foreword.store.urls import check_stores, open_store

    shown = redacted(url).partition("?")[0]
    try:
        [parsed] = check_stores([url])
        if parsed.reach is Reach.INSTANCE:
            return Finding("store", f"{shown}: not checked, as only a running server connects to another one")
        if not parsed.type.exists(parsed):
            return Finding("store", f"{shown}: not there yet; a server can create it")
        began = time.monotonic()
        with closing(open_store([url], keys=keys_of(config.store, config.encryption))) as tiers:
            store = tiers.tiers[0].store
            store.lookup([bytes(NAME_BYTES)], deadline=began + _STORE_SECONDS)
            status = store.status()
        seconds = time.monotonic() - began
    except ForewordError as error:
        text = error.message if shown in error.message else f"{shown}: {error.message}"
        return Finding("store", text, ok=False)
    held = f", {status.blocks} blocks" if status.blocks >= 0 else ""
    return Finding("store", f"{shown}: opened and answered in {seconds * 1000:.0f} ms{held}")


def _model(config: Config, verbose: bool) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        from foreword.entrypoints.build_engine import build_engine

        info = build_engine(config.engine, prefixes=config.prefixes).info
    except ForewordError as error:
        yield Finding("model", error.message, ok=False)
        return
    seconds = time.monotonic() - began
    text = f"{info.name}: loaded in {seconds:.1f} s, {info.parameters} parameters, {info.dtype} on {info.device}, "
    yield Finding(
        "model",
        text + f"up to {info.max_model_len} tokens, KV memory for {info.kv_tokens} tokens at "
        f"{info.kv_bytes_per_token} bytes each",
    )
    yield Finding(
        "exact", f"not batch-invariant: {info.inexact}" if info.inexact else "a hit has the bits of a computation"
    )
    for line in info.backends if verbose else ():
        yield Finding("chosen", line)


def _first_line(path: str) -> str:
    return next(iter(system_lines(path)), "")
