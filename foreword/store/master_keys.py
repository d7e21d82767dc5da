"""Master keys: they encrypt tenants' data keys, and nothing else. From the configuration, a file, or a command of a KMS."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

from foreword.config import EncryptionConfig, read_text
from foreword.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ENTRY: Final = re.compile(r"([A-Za-z0-9._-]{1,32}):([0-9a-fA-F]{64})")
_COMMAND_SECONDS: Final = 30.0
_MAX_BYTES: Final = 1 << 16
_AGAIN_SECONDS: Final = 5.0  # between two attempts to find an unknown key


class MasterKeys:
    """The master keys of a deployment. Thread-safe.

    Raises ConfigError if they cannot be read, without repeating one.
    """

    def __init__(self, config: EncryptionConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._keys: dict[str, AESGCM] = {}
        self._read()

    @property
    def current(self) -> tuple[str, AESGCM]:
        """The id and the key that encrypt: the first."""
        return next(iter(self._keys.items()))

    def get(self, name: str) -> AESGCM | None:
        """The key with this id. An unknown one is looked for again, once every few seconds. None if there is none."""
        with self._lock:
            if name not in self._keys and time.monotonic() - self._read_at > _AGAIN_SECONDS:
                self._read()
            return self._keys.get(name)

    def _read(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            raise ConfigError("encryption needs: pip install 'foreword[integrity]'") from None
        self._read_at = time.monotonic()
        keys = {}
        for entry in self._entries():
            match = ENTRY.fullmatch(entry)
            if match is None or match[1] in keys:
                raise ConfigError(
                    "master keys are written ID:KEY, each ID once, KEY 64 hexadecimal digits; create one with "
                    "`foreword keys new-master ID`"
                )
            keys[match[1]] = AESGCM(bytes.fromhex(match[2]))
        if not keys:
            raise ConfigError("there is no master key")
        self._keys = keys

    def _entries(self) -> list[str]:
        config = self._config
        if config.master_keys:
            return list(config.master_keys)
        if config.master_key_file is not None:
            text = read_text(config.master_key_file, "encryption.master_key_file", "ascii")
        else:
            text = _output(shlex.split(config.master_key_command or ""))
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return [line for line in lines if line]


def _output(command: list[str]) -> str:
    """What a command prints, within limits of time and length. Raises ConfigError without repeating it."""
    what = f"encryption.master_key_command {command[0] if command else ''!r}"
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as running:
            timer = threading.Timer(_COMMAND_SECONDS, running.kill)
            timer.start()
            read = b""
            assert running.stdout is not None
            try:
                read = running.stdout.read(_MAX_BYTES + 1)
            finally:
                if len(read) > _MAX_BYTES:
                    running.kill()
                status = running.wait()
                timer.cancel()
        text = read.decode("ascii")
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{what}: {reason_of(error)}") from None
    if status or len(read) > _MAX_BYTES:
        raise ConfigError(f"{what} failed with status {status}, took longer than 30 s or printed more than 64 KiB")
    return text
