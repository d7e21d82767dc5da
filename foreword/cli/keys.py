"""`foreword keys`: data keys of tenants, and master keys."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.commands import described
from foreword.cli.server_client import plural
from foreword.cli.store import TenantSecret, salt_of
from foreword.config_files import read_encryption
from foreword.errors import ConfigError
from foreword.store_config import EncryptionConfig

if TYPE_CHECKING:
    from foreword.store.data_keys import DataKeys

keys_app = typer.Typer(help="Keys that encrypt blocks in stores.", no_args_is_help=True, rich_markup_mode=None)

_LONGEST_KEEP = 1e12
_PATIENCE = 60.0

File = Annotated[
    Path | None, typer.Option("--config", help="TOML file with [encryption]; without it FOREWORD_ENCRYPTION_* count.")
]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Name of a tenant; needs --tenant-secret.")]
NoTenant = Annotated[bool, typer.Option("--no-tenant", help="What servers without API keys have stored.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(keys_app, name="keys")


def _opened(config: Path | None) -> closing[DataKeys]:
    from foreword.store.data_keys import DataKeys, check_exists

    chosen = EncryptionConfig.from_environment() if config is None else read_encryption(config)
    if chosen.key_store is None:
        raise ConfigError("there is no key store: set FOREWORD_ENCRYPTION_KEY_STORE, or name a file with --config")
    check_exists(chosen)
    return closing(DataKeys(chosen, call_seconds=_PATIENCE))


def _salt(tenant: str | None, secret: str | None, no_tenant: bool) -> bytes:
    if (tenant is None) == (not no_tenant):
        raise ConfigError("choose exactly one of --tenant and --no-tenant")
    return salt_of(tenant, secret).tenant


@keys_app.command("list", **described("keys list"))
def list_keys(
    *, config: File = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List data keys: their tenants as in names of blocks, master keys, ages and ends."""
    with _opened(config) as keys:
        found: list[dict[str, Any]] = [
            {"tenant": one.tenant.hex(), "id": f"{one.id:08x}", "master": one.key and one.key.master}
            | {"created": one.key and one.key.created, "ends": one.key and (None if one.key.seals else one.key.ends)}
            for one in keys.all()
            if not one.destroyed
        ]
        destroyed = [tenant.hex() for tenant in keys.destroyed()]
    if as_json:
        print(json.dumps({"keys": found, "destroyed": destroyed}, indent=2))
        return
    for one in found:
        ends = "" if one["ends"] is None else f", ends in {max(one['ends'] - time.time(), 0):.0f} s"
        about = f"encrypted by {one['master']}{ends}" if one["master"] else "cannot be decrypted with these master keys"
        print(f"{one['tenant']}/{one['id']}  {about}")
    print(f"{plural(len(found), 'key')}, {plural(len(destroyed), 'destroyed tenant')}")


@keys_app.command("rotate", **described("keys rotate", "keys rotate --tenant alice --keep 86400"))
def rotate(
    *,
    tenant: TenantOption = None,
    tenant_secret: TenantSecret = None,
    keep: Annotated[
        float, typer.Option("--keep", help="Seconds for which what a tenant has stays readable.")
    ] = 86400.0,
    config: File = None,
) -> None:
    """Encrypt all data keys by the first master key, or give one tenant a new data key.

    No block is written. Status 1 if a data key could not be decrypted.
    """
    if not 0 <= keep <= _LONGEST_KEEP:
        raise ConfigError(f"--keep is from 0 to {_LONGEST_KEEP:.0e} seconds, not {keep}")
    with _opened(config) as keys:
        if tenant is None:
            done, failed = keys.wrap_again()
            print(json.dumps({"master": keys.master, "keys": done, "failed": failed}, indent=2))
            if failed:
                raise typer.Exit(1)
            return
        from foreword.store.data_keys import tenant_of_salt

        current = keys.current(salt_of(tenant, tenant_secret).tenant)
        fresh = keys.rotate(tenant_of_salt(current), keep)
    if fresh is None:
        raise ConfigError(f"the keys of {tenant} were destroyed meanwhile")
    print(json.dumps({"tenant": tenant, "key": f"{fresh.id:08x}", "before_ends_in": keep}, indent=2))


@keys_app.command("destroy", **described("keys destroy --tenant alice"))
def destroy(
    *,
    tenant: TenantOption = None,
    tenant_secret: TenantSecret = None,
    no_tenant: NoTenant = False,
    config: File = None,
) -> None:
    """Destroy all data keys of a tenant: nothing that it has in any store, or in a copy of one, can be read any more.

    `foreword forget` does this, and then deletes the blocks too.
    """
    from foreword.store.data_keys import tenant_of_salt

    salt = _salt(tenant, tenant_secret, no_tenant)
    with _opened(config) as keys:
        began = time.monotonic()
        dead = [f"{one.hex()}/{number:08x}" for one, number in keys.destroy(tenant_of_salt(salt))]
        seconds = time.monotonic() - began
    print(json.dumps({"destroyed": dead, "seconds": round(seconds, 3)}, indent=2))


@keys_app.command("new-master", **described("keys new-master 2026-11 >> masters"))
def new_master(name: Annotated[str, typer.Argument(metavar="ID", help="Its id.")]) -> None:
    """Print a new random master key as a line for a file of master keys. The first line of the file encrypts."""
    from foreword.store.master_keys import ENTRY

    entry = f"{name}:{secrets.token_hex(32)}"
    if ENTRY.fullmatch(entry) is None:
        raise ConfigError("an id of a master key has up to 32 letters, digits and ._-")
    print(entry)
