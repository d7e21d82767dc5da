"""`foreword keys`, and `foreword forget` for encrypted stores."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from config_constants import constants
from typer.testing import CliRunner

from foreword.blocks.salt import Salt, derive_salt
from foreword.cli.main import app
from foreword.conformance import make_frames, read, soon, whole
from foreword.errors import ConfigError, StoreError
from foreword.store import data_keys
from foreword.store.frame import Frame
from foreword.store.store_keys import keys_from_environment
from foreword.store.urls import open_store
from foreword.store_config import EncryptionConfig

SECRET = "a tenant secret of the tests"


@pytest.fixture
def masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of master keys that the environment names."""
    monkeypatch.setattr(data_keys, "_CALL_SECONDS", 60.0)  # a busy machine is no key store that hangs
    file = tmp_path / "masters"
    monkeypatch.setenv("FOREWORD_ENCRYPTION_KEY_STORE", str(tmp_path / "keys"))
    monkeypatch.setenv("FOREWORD_ENCRYPTION_MASTER_KEY_FILE", str(file))
    monkeypatch.setenv("FOREWORD_SERVER_TENANT_SECRET", SECRET)
    with constants(EncryptionConfig, check_seconds=0.01):
        run("keys", "new-master", "first", to=file)
        yield file


def run(*arguments: str, to: Path | None = None, status: int = 0) -> Any:
    """The JSON that a command prints. Its output is written to a file instead."""
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    if to is not None:
        before = to.read_text() if to.exists() else ""
        to.write_text(result.output + before)
        return None
    return json.loads(result.output)


def stored(tmp_path: Path, frames: list[Frame], *, put: bool = False) -> list[bytes | None]:
    with closing(open_store([f"disk://{tmp_path}/store?size=64MiB"], keys=keys_from_environment())) as store:
        if put:
            store.put(frames, deadline=soon())
        return read(store, frames)


def frames_of(tenant: str, seed: int) -> list[Frame]:
    return make_frames(seed, 3, 500, root=Salt(derive_salt(SECRET.encode(), tenant)).digest + bytes(16))


def test_a_life_of_keys(tmp_path: Path, masters: Path) -> None:
    """Keys are listed, encrypted by a new master key, given successors, and destroyed; the commands say what they have done."""
    ann, bob = frames_of("ann", 1), frames_of("bob", 2)
    stored(tmp_path, ann, put=True)
    stored(tmp_path, bob, put=True)
    listed = run("keys", "list", "--json")
    assert (
        len(listed["keys"]) == 2 and {one["master"] for one in listed["keys"]} == {"first"} and not listed["destroyed"]
    )
    assert CliRunner().invoke(app, ["keys", "list"]).output.endswith("2 keys, 0 destroyed tenants\n")
    run("keys", "new-master", "second", to=masters)
    assert run("keys", "rotate") == {"master": "second", "keys": 2, "failed": 0}
    masters.write_text(masters.read_text().splitlines()[0])
    assert stored(tmp_path, ann) == whole(ann)
    answer = run("keys", "rotate", "--tenant", "ann", "--keep", "3600")
    assert answer["tenant"] == "ann" and answer["before_ends_in"] == 3600
    listed = run("keys", "list", "--json")["keys"]
    assert [one["id"] for one in listed if one["ends"] is None and one["id"] == answer["key"]] == [answer["key"]]
    assert stored(tmp_path, ann) == whole(ann)
    dead = run("keys", "destroy", "--tenant", "ann")
    assert len(dead["destroyed"]) == 2
    assert stored(tmp_path, ann) == [None] * 3 and stored(tmp_path, bob) == whole(bob)
    assert len(run("keys", "list", "--json")["destroyed"]) == 1


def test_forget_destroys_keys(tmp_path: Path, masters: Path) -> None:
    """`foreword forget --tenant` destroys the tenant's keys, deletes its blocks, and names both in the receipt."""
    ann, bob = frames_of("ann", 1), frames_of("bob", 2)
    stored(tmp_path, [*ann, *bob], put=True)
    receipt = run("forget", "--tenant", "ann", f"disk://{tmp_path}/store")
    assert receipt["complete"] and len(receipt["keys"]) == 1 and receipt["removed"] == {"disk": 3}
    assert receipt["places"][0]["tier"] == "key store"
    assert stored(tmp_path, ann) == [None] * 3 and stored(tmp_path, bob) == whole(bob)
    session = run("forget", "--tenant", "bob", "--cache-salt", "one", f"disk://{tmp_path}/store")
    assert session["keys"] == [] and stored(tmp_path, bob) == whole(bob)


@pytest.mark.parametrize("session", [None, "one"])
def test_forget_in_a_later_generation(
    tmp_path: Path, masters: Path, monkeypatch: pytest.MonkeyPatch, session: str | None
) -> None:
    """A tenant whose keys were destroyed before is erased with what it has stored since, also by a tool without the key store;
    so is a session of it."""
    base = derive_salt(SECRET.encode(), "ann")
    keys = keys_from_environment()
    assert keys is not None
    for turn in range(2):
        salt = Salt.of(keys.current(base), session)
        frames = make_frames(turn, 3, 500, root=salt.digest + bytes(16))
        assert stored(tmp_path, frames, put=True) == whole(frames)
        if turn == 0:
            run("keys", "destroy", "--tenant", "ann")
            deadline = soon()
            while keys.current(base) == base:  # until check_seconds have passed
                assert time.monotonic() < deadline
    with monkeypatch.context() as without:
        if session is None:
            for name in ("KEY_STORE", "MASTER_KEY_FILE"):
                without.delenv(f"FOREWORD_ENCRYPTION_{name}")
        given = () if session is None else ("--cache-salt", session)
        receipt = run("forget", "--tenant", "ann", *given, f"disk://{tmp_path}/store")
    assert receipt["complete"] and receipt["removed"] == {"disk": 6} and receipt["keys"] == []
    assert stored(tmp_path, frames) == [None] * 3


def test_a_tool_makes_no_key_store(tmp_path: Path, masters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped key store makes the tool call nothing destroyed or erased, and nothing is written."""
    stored(tmp_path, frames_of("ann", 1), put=True)
    monkeypatch.setenv("FOREWORD_ENCRYPTION_KEY_STORE", str(tmp_path / "kyes"))
    for command in (
        ["keys", "destroy", "--tenant", "ann"],
        ["keys", "list"],
        ["forget", "--tenant", "ann", f"disk://{tmp_path}/store"],
        ["verify", f"disk://{tmp_path}/store"],
    ):
        with pytest.raises(StoreError, match=r"no key store at .*kyes"):
            run(*command)
    assert not (tmp_path / "kyes").exists()


def test_secrets_from_files(tmp_path: Path, masters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's secret that is written `file:PATH` names the same tenant, in every command; so do secrets that sign."""
    ann, secrets = frames_of("ann", 1), tmp_path / "secrets"
    stored(tmp_path, ann, put=True)
    secrets.write_text(SECRET + "\n")
    monkeypatch.setenv("FOREWORD_SERVER_TENANT_SECRET", f"file:{secrets}")
    assert len(run("keys", "destroy", "--tenant", "ann")["destroyed"]) == 1
    assert stored(tmp_path, ann) == [None] * 3
    receipt = run("forget", "--tenant", "ann", f"disk://{tmp_path}/store")
    assert receipt["removed"] == {"disk": 3}
    secrets.write_text("1:the first secret of the tests\n2:the second secret of the tests\n")
    monkeypatch.setenv("FOREWORD_STORE_INTEGRITY_SECRETS", f"file:{secrets}")
    ring = keys_from_environment(EncryptionConfig())
    assert ring is not None and all(ring.verifying(number, b"scope") for number in (1, 2))


def test_wrong_uses(tmp_path: Path, masters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing key store, no choice of a tenant, a wrong id, and keys of an unknown master key are errors."""
    stored(tmp_path, frames_of("ann", 1), put=True)
    for wrong in (
        ["keys", "destroy"],
        ["keys", "destroy", "--tenant", "a", "--no-tenant"],
        ["keys", "new-master", "a b"],
    ):
        with pytest.raises(ConfigError):
            run(*wrong)
    masters.unlink()
    run("keys", "new-master", "other", to=masters)
    assert run("keys", "rotate", status=1) == {"master": "other", "keys": 0, "failed": 1}
    assert "cannot be decrypted" in CliRunner().invoke(app, ["keys", "list"]).output
    file = tmp_path / "foreword.toml"
    file.write_text(f'[encryption]\nkey_store = "{tmp_path}/keys"\nmaster_key_file = "{masters}"\n')
    for name in [name for name in os.environ if name.startswith("FOREWORD_")]:
        monkeypatch.delenv(name)
    assert len(run("keys", "list", "--json", "--config", str(file))["keys"]) == 1
    with pytest.raises(ConfigError, match="key store"):
        run("keys", "list")
