"""`foreword inspect`, `verify`, `copy` and `forget`: list, check, copy and remove the contents of stores."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.salt import Salt
from foreword.cli.commands import described
from foreword.cli.server_client import call_server, plural
from foreword.config import check_secret
from foreword.config_layers import read_secret
from foreword.errors import ConfigError
from foreword.store_config import EncryptionConfig

if TYPE_CHECKING:
    from foreword.prefixes.erasure import StoredChains
    from foreword.store.base import StoredBlock
    from foreword.store.key_interfaces import StoreKeys
    from foreword.store.layout_records import LayoutRecord
    from foreword.store.tier import StoreTier
    from foreword.store.tiered import TieredStore

Urls = Annotated[
    list[str], typer.Argument(metavar="URL...", help="URLs of stores, for example disk:///var/cache/foreword.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _read_tenant_secret(text: str | None) -> str | None:
    if text:
        check_secret("--tenant-secret", text := read_secret(text, "--tenant-secret"))
    return text


TenantSecret = Annotated[
    str | None,
    typer.Option(
        "--tenant-secret",
        envvar="FOREWORD_SERVER_TENANT_SECRET",
        callback=_read_tenant_secret,
        help="The servers' secret.",
    ),
]
_BATCH = 32
_SHOWN = 20  # names of blocks that `foreword copy` prints
_CALL_WITHIN = 60.0
# The buffer for a frame whose size the store does not list.
_LARGEST_FRAME = 64 << 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("inspect", **described("inspect disk:///var/cache/foreword"))(inspect_store)
    app.command("verify", **described("verify --repair disk:///var/cache/foreword"))(verify)
    app.command("copy", **described("copy disk:///old/kv 'disk:///new/kv?size=400GiB'"))(copy)
    app.command("forget", **described("forget --tenant alice disk:///var/cache/foreword"))(forget)


def _keys() -> StoreKeys | None:
    """The environment's keys, in a key store that exists."""
    from foreword.store.store_keys import encryption, keys_from_environment

    config = EncryptionConfig.from_environment()
    if config.key_store is not None:
        encryption().check_exists(config)
    return keys_from_environment(config)


def _opened(urls: list[str], keys: StoreKeys | None, *, only_read: bool = False) -> closing[TieredStore]:
    """Open stores that exist: a tool creates none."""
    from foreword.store.types import Reach
    from foreword.store.urls import open_store, parse

    for url in map(parse, urls):
        if url.reach is Reach.PROCESS:
            raise ConfigError(
                f"{url.shown}: a {url.scheme}:// store is in the memory of its server; name a store that outlives a process"
            )
    return closing(open_store(urls, keys=keys, must_exist=True, only_read=only_read))


# inspect


def inspect_store(urls: Urls, *, as_json: Json = False) -> None:
    """List what stores contain.

    Shows models, blocks, bytes, hits, ages and named prefixes. Changes nothing.
    """
    from foreword.prefixes.erasure import named_prefixes
    from foreword.store.layout_records import layouts

    with _opened(urls, _keys(), only_read=True) as store:
        known = layouts(store)
        tiers = [_tier_summary(tier, known) for tier in store.tiers]
        prefixes: list[dict[str, Any]] = [
            {"name": record.name, "version": record.version, "model": record.model, "tokens": record.num_tokens}
            | {"kind": record.kind, "created": record.created, "tenant": word.split("/")[2]}
            for word, record in named_prefixes(store).items()
        ]
    if as_json:
        print(json.dumps({"tiers": tiers, "prefixes": prefixes}, indent=2))
        return
    for tier in tiers:
        _print_tier(tier)
    print(f"named prefixes: {len(prefixes)}")
    for prefix in prefixes:
        print(
            f"  {prefix['name']}  version {prefix['version']}  {prefix['tokens']} tokens  {prefix['kind']}  "
            f"model {prefix['model']}  {_age(prefix['created'])} old"
        )


def _tier_summary(tier: StoreTier, known: dict[bytes, LayoutRecord]) -> dict[str, Any]:
    from foreword.prefixes.erasure import SCAN_WITHIN, StoredChains

    by_layout: dict[bytes, list[StoredBlock]] = {}
    for entry in tier.store.scan(deadline=time.monotonic() + SCAN_WITHIN):
        by_layout.setdefault(entry.name[:FINGERPRINT_BYTES], []).append(entry)
    status = tier.store.status()
    groups = [
        _group_summary(fingerprint, entries, StoredChains(entries), known.get(fingerprint))
        for fingerprint, entries in by_layout.items()
    ]
    return {
        "tier": tier.label,
        "blocks": sum(len(entries) for entries in by_layout.values()),
        "bytes": sum(entry.size for entries in by_layout.values() for entry in entries),
        "budget_bytes": status.budget,
        "pinned_bytes": status.pinned_bytes,
        "evictions": status.evictions,
        "layouts": groups,
    }


def _group_summary(
    fingerprint: bytes, entries: list[StoredBlock], chains: StoredChains, record: LayoutRecord | None
) -> dict[str, Any]:
    from foreword.blocks.layout import tenant_of

    stored = [entry.stored_at for entry in entries if entry.stored_at]
    used = [entry.used_at for entry in entries if entry.used_at]
    return {
        "layout": fingerprint.hex(),
        "model": record.model if record else None,
        "model_fingerprint": record.digest.hex() if record else None,
        "block_size": record.group.block_size if record else None,
        "dtype": record.layout.get("dtype") if record else None,
        "loss": record.layout.get("loss") if record else None,
        "blocks": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "tenants": len({tenant_of(entry.name) for entry in entries}),
        "chains": chains.leaves(),
        "longest_chain": max((entry.depth for entry in entries), default=-1) + 1,
        "unreachable": chains.unreachable(),
        "hits": sum(entry.hits for entry in entries),
        "pinned": sum(entry.pinned for entry in entries),
        "oldest": min(stored, default=None),
        "newest": max(stored, default=None),
        "last_used": max(used, default=None),
    }


def _print_tier(tier: dict[str, Any]) -> None:
    budget = f" of {_size(tier['budget_bytes'])}" if tier["budget_bytes"] else ""
    size, pinned = _size(tier["bytes"]), _size(tier["pinned_bytes"])
    print(f"{tier['tier']}: {plural(tier['blocks'], 'block')}, {size}{budget}, {pinned} pinned")
    for group in tier["layouts"]:
        chains = f"{plural(group['chains'], 'chain')} of {plural(group['tenants'], 'tenant')}"
        used = f"{group['unreachable']} unreachable, {plural(group['hits'], 'hit')}"
        name = group["model"] or "unknown model"
        about = f"  {group['dtype']}, {group['block_size']} tokens a block" if group["model"] else ""
        print(f"  {name} (layout {group['layout']}){about}")
        print(
            f"    {plural(group['blocks'], 'block')}, {_size(group['bytes'])}, {chains}, "
            f"the longest {plural(group['longest_chain'], 'block')}, {used}"
        )
        if group["oldest"] is not None:
            last = f", last used {_age(group['last_used'])} ago" if group["last_used"] else ""
            print(f"    oldest {_age(group['oldest'])}, newest {_age(group['newest'])}{last}")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(then: float) -> str:
    seconds = max(time.time() - then, 0)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return plural(round(seconds), "second")


# verify


@dataclass(slots=True)
class _TierFindings:
    sound: int = 0
    gone: int = 0
    read: int = 0
    unread: int = 0
    foreign: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    damaged: dict[bytes, int] = field(default_factory=dict)  # the length of a buffer for each
    removed: int = 0


def verify(
    urls: Urls,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged blocks. They are recomputed when they are needed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every block and check its checksum. Status 1 if a damaged block remains."""
    with _opened(urls, _keys(), only_read=not repair) as store:
        found = {tier.label: _verify_tier(tier, repair) for tier in store.tiers}
    if as_json:
        counts = {
            label: {
                "sound": one.sound, "bad": dict(one.bad), "gone": one.gone, "unread": one.unread, "foreign": one.foreign,
                "bytes": one.read, "removed": one.removed,
            }
            for label, one in found.items()
        }  # fmt: skip
        print(json.dumps(counts, indent=2))
    else:
        for label, one in found.items():
            bad = (
                ", ".join(f"{count} damaged ({reason})" for reason, count in sorted(one.bad.items())) or "none damaged"
            )
            gone = f", {one.gone} evicted meanwhile" if one.gone else ""
            left = f"{one.unread} could not be read (left as they are), " if one.unread else ""
            left += f"{one.foreign} of another key, codec or version (left as they are), " if one.foreign else ""
            print(
                f"{label}: {plural(one.sound, 'block')} intact, {_size(one.read)} read, {bad}{gone}, {left}"
                f"{one.removed} removed"
            )
    if any(sum(one.bad.values()) > one.removed or one.unread for one in found.values()):
        raise typer.Exit(1)


def _verify_tier(tier: StoreTier, repair: bool) -> _TierFindings:
    from rich.console import Console
    from rich.progress import Progress

    from foreword.prefixes.erasure import SCAN_WITHIN

    entries = sorted(tier.store.scan(deadline=time.monotonic() + SCAN_WITHIN), key=lambda entry: entry.name)
    found = _TierFindings()
    with Progress(console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(f"{tier.label}: {len(entries)} blocks", total=len(entries))
        for low in range(0, len(entries), _BATCH):
            batch = entries[low : low + _BATCH]
            _verify_batch(tier, batch, found)
            bar.advance(task, len(batch))
    if repair and found.damaged:
        found.removed = tier.delete_damaged(found.damaged, time.monotonic() + _CALL_WITHIN)
    return found


def _verify_batch(tier: StoreTier, batch: list[StoredBlock], found: _TierFindings) -> None:
    from foreword.store.base import FOREIGN, MISSING
    from foreword.store.frame import Frame

    names, sizes = [entry.name for entry in batch], [entry.size or _LARGEST_FRAME for entry in batch]
    outcomes = tier.examine(names, sizes, time.monotonic() + _CALL_WITHIN)
    for name, size, outcome in zip(names, sizes, outcomes, strict=True):
        if isinstance(outcome, Frame):
            found.sound += 1
            found.read += len(outcome.data)
        elif isinstance(outcome, str):
            found.bad[outcome] += 1
            found.damaged[name] = size
        else:
            found.gone += outcome == MISSING
            found.foreign += outcome == FOREIGN
            found.unread += outcome not in (MISSING, FOREIGN)


# copy


def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="URL of the store to copy, which stays as it is.")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="URL of the store that gets the copy; it may be new.")
    ],
    *,
    patience: Annotated[
        float,
        typer.Option(
            "--patience", min=0, metavar="SECONDS", help="How long a store may be late or fail before the copy ends."
        ),
    ] = 300.0,
    as_json: Json = False,
) -> None:
    """Copy a store into another one, of any type.

    Verifies every block when it is read and again in the target. Copies pins, and records of prefixes and models. Asks a store
    that is late again. A copy that was interrupted is continued by the same command. Status 1 if something could not be copied.
    """
    from rich.console import Console
    from rich.progress import Progress

    from foreword.prefixes.store_copy import copy_store
    from foreword.store.types import Reach
    from foreword.store.urls import check_stores, open_store

    keys = _keys()
    urls = check_stores([source, target])
    for url in urls:
        if url.reach is Reach.PROCESS:
            raise ConfigError(f"{url.shown}: a {url.scheme}:// store ends with its process; name one that outlives it")
    with (
        _opened([source], keys, only_read=True) as old,
        closing(open_store([target], keys=keys)) as new,
        Progress(console=Console(file=sys.stderr)) as bar,
    ):
        task = bar.add_task("blocks", total=None)
        done = copy_store(
            old.tiers[0],
            new.tiers[0],
            lambda count, blocks: bar.update(task, completed=count, total=blocks),
            shown=(urls[0].shown, urls[1].shown),
            patience=patience,
            late=lambda problem: bar.console.print(problem, markup=False, highlight=False, soft_wrap=True),
        )
        at, of = bar.tasks[task].completed, bar.tasks[task].total
    if as_json:
        print(json.dumps({**asdict(done), "complete": done.complete}, indent=2))
    else:
        print(
            f"{plural(done.blocks, 'block')} copied ({_size(done.bytes)}), {done.present} there already; all verified"
        )
        print(f"{plural(done.records, 'record')} of prefixes and models")
        for count, what in (
            (done.kept_records, "records are another version in the target, which stays"),
            (done.left_records, "records are of other kinds, and are not copied"),
            (done.erased, "blocks and records are being erased, and are not copied"),
            (done.removed, "blocks left the source meanwhile, and were removed from the target"),
            (done.unpinned, "blocks are not pinned: the target has no room for more pins"),
            (sum(done.damaged.values()), "blocks of the source are damaged"),
            (done.bad_records, "records of the source are damaged"),
            (done.foreign, "blocks are sealed with a key that is not known here (FOREWORD_STORE_INTEGRITY_SECRETS)"),
            (done.unread, "blocks of the source could not be read"),
            (done.lost, "blocks are not in the target as they were written: is it full?"),
        ):
            if count:
                print(f"{count} {what}")
        for block in done.named[:_SHOWN]:
            print(f"  {block}")
        if len(done.named) > _SHOWN:
            print(f"  and {len(done.named) - _SHOWN:,} more, which --json names")
    if done.ended:
        where = "before the first block" if of is None else f"after {at:,.0f} of {of:,.0f} blocks, which stay"
        print(
            f"foreword: {done.ended}\nThe copy has ended {where}. Check that store, then run the same command, which "
            "continues; --patience waits longer.",
            file=sys.stderr,
        )
    if not done.complete:
        raise typer.Exit(1)


# forget


def forget(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL...]", help="URLs of stores; or use --server.")
    ] = None,
    *,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Name of a tenant; needs --tenant-secret.")] = None,
    tenant_secret: TenantSecret = None,
    everyone: Annotated[bool, typer.Option("--no-tenant", help="Blocks of servers without API keys.")] = False,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="A named prefix and the blocks that continue it.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name or fingerprint of a model.")] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", help="URL of a server: all blocks of the caller."),
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key of the caller, for --server.")] = None,
    cache_salt: Annotated[
        str | None,
        typer.Option("--cache-salt", help="Only requests with this cache_salt: a session. With a tenant or --server."),
    ] = None,
) -> None:
    """Delete blocks from stores.

    Destroys a tenant's data keys first, if blocks are encrypted (FOREWORD_ENCRYPTION_*). Then deletes from all given stores and
    prints a receipt as JSON, signed if there is a tenant secret. Status 1 if blocks remain or a store could not be reached. It
    can be repeated.
    """
    if sum(map(bool, (tenant, everyone, prefix, model, server))) != 1:
        raise ConfigError(
            "choose what to delete with exactly one of --tenant, --no-tenant, --prefix, --model and --server"
        )
    if cache_salt is not None and (not cache_salt or prefix is not None or model is not None):
        raise ConfigError("--cache-salt is not empty, and is for --tenant, --no-tenant and --server")
    if server is not None:
        if urls:
            raise ConfigError("--server erases what that server reaches: leave out the URLs of stores, or --server")

        query = "" if cache_salt is None else "?" + urlencode({"cache_salt": cache_salt})
        _print_receipt(call_server(server, api_key, "DELETE", f"/v1/cache{query}"))
        return
    if not urls:
        raise ConfigError("name the stores to delete from, for example disk:///var/cache/foreword")
    from foreword.prefixes import erasure

    keys = _keys()
    data = None if keys is None else keys.data
    with _opened(urls, keys) as store:
        if model is not None:
            receipt = erasure.forget_model(store, model)
        elif prefix is not None:
            receipt = erasure.forget_prefix(store, prefix)
        else:
            salt = salt_of(tenant, tenant_secret, cache_salt)
            salts = [salt] if data is None or cache_salt is None else data.sessions(salt.tenant, cache_salt)
            receipt = erasure.forget_tenant(store, *salts, keys=data)
    _print_receipt(receipt.plain(tenant_secret))


def salt_of(tenant: str | None, secret: str | None, cache_salt: str | None = None) -> Salt:
    """The salt of a tenant's requests (None: of those without a tenant), or of those with a `cache_salt`."""
    from foreword.blocks.salt import derive_salt

    if tenant is not None and secret is None:
        raise ConfigError("--tenant needs the servers' --tenant-secret: it determines the names of the tenant's blocks")
    salt = b"" if tenant is None or secret is None else derive_salt(secret.encode(), tenant)
    return Salt.of(salt, cache_salt)


def _print_receipt(receipt: dict[str, object]) -> None:
    print(json.dumps(receipt, indent=2))
    if receipt.get("left") or receipt.get("complete") is False:
        raise typer.Exit(1)
