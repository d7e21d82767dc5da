"""Master keys: they encrypt tenants' data keys, and nothing else. From the configuration, a file, or a command of a KMS.

A command is foreign code: it may hang, and so may a file of a network. After the start it therefore runs on a thread of its
own, at most one at a time. No lock is held meanwhile, and a key that is known is returned without one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from foreword.config import read_text
from foreword.errors import ConfigError, reason_of
from foreword.store.background import background_thread, renew_in_child
from foreword.store_config import EncryptionConfig

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger("foreword.store")

ENTRY: Final = re.compile(r"([A-Za-z0-9._-]{1,32}):([0-9a-fA-F]{64})")
_COMMAND_SECONDS: Final = 30.0
_MAX_BYTES: Final = 1 << 16
_STEP_SECONDS: Final = (
    0.05  # between two looks whether the command has ended while other processes have its output open
)
# Kills a group, whose number is the first line of its input, when that ends without another line.
_KILLS_BEHIND: Final = 'read -r group && { read -r done || kill -KILL "-$group"; }'
# Gives it the number of its group, before it runs what follows.
_TIED: Final = ("/bin/sh", "-c", 'echo $$ >&0; exec "$@" </dev/null', "sh")
_AGAIN_SECONDS: Final = 5.0  # between the end of an attempt to find an unknown key and the next one
_WAIT_SECONDS: Final = 1.0  # that calls wait for an attempt, counted from its start


@dataclass(slots=True)
class _Attempt:
    """An attempt to read the master keys again."""

    started: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)


class MasterKeys:
    """The master keys of a deployment. Thread-safe.

    Raises ConfigError if they cannot be read, without repeating one.
    """

    def __init__(self, config: EncryptionConfig) -> None:
        self._config = config
        self._keys = self._read()  # is replaced as a whole, so readers take no lock
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # of the two below
        self._attempt: _Attempt | None = None
        self._ended_at = time.monotonic()  # when the last attempt ended

    @property
    def current(self) -> tuple[str, AESGCM]:
        """The id and the key that encrypt: the first."""
        return next(iter(self._keys.items()))

    def get(self, name: str, deadline: float = math.inf) -> AESGCM | None:
        """The key with this id. An unknown one is looked for again, once every few seconds, for which this call waits a second
        at most. None if it is not known by then."""
        key = self._keys.get(name)
        if key is None and not self._config.master_keys:
            self._look_again(deadline)
            key = self._keys.get(name)
        return key

    def _look_again(self, deadline: float) -> None:
        """Begin an attempt to read the keys if it is time, and wait for the attempt under way."""
        with self._lock:
            attempt = self._attempt
            if attempt is None:
                if time.monotonic() - self._ended_at <= _AGAIN_SECONDS:
                    return
                attempt = _Attempt()
                # The thread cannot end before this lock is free, so it never leaves its own attempt here.
                background_thread(partial(self._try, attempt), "master-keys")
                self._attempt = attempt
        attempt.done.wait(max(min(deadline, attempt.started + _WAIT_SECONDS) - time.monotonic(), 0.0))

    def _try(self, attempt: _Attempt) -> None:
        try:
            self._keys = self._read()
        except ConfigError as error:
            log.warning("the master keys that are known stay in use: %s", error.message)
        finally:
            with self._lock:
                self._attempt = None
                self._ended_at = time.monotonic()
            attempt.done.set()

    def _read(self) -> dict[str, AESGCM]:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            raise ConfigError("encryption needs: pip install 'foreword[integrity]'") from None
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
        return keys

    def _entries(self) -> list[str]:
        config = self._config
        if config.master_keys:
            return list(config.master_keys)
        if config.master_key_file is not None:
            text = _read_file(config.master_key_file)
        else:
            text = _output(shlex.split(config.master_key_command or ""))
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return [line for line in lines if line]


def _read_file(path: str) -> str:
    """The file with the keys. Raises ConfigError, also if every user of the machine can change it."""
    text = read_text(path, "encryption.master_key_file", "ascii")
    try:
        mode = os.stat(path).st_mode
    except OSError as error:  # it is replaced at this moment
        raise ConfigError(f"encryption.master_key_file {path}: {reason_of(error)}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(
            f"every user can change encryption.master_key_file {path}: chmod o-w {path}; where its file system keeps no "
            "modes, mount it with others (file_mode=, umask=), or move the file"
        )
    return text


def _output(command: list[str]) -> str:
    """The output of a command, within limits of time and length. Raises ConfigError without repeating it.

    The command leads a process group. On every way out but success the whole group is killed: a shell is rarely what hangs.
    So it is if this process is killed meanwhile, where there is a shell to see to it.
    """
    what = f"encryption.master_key_command {command[0] if command else ''!r}"
    status = None
    try:
        if shutil.which(command[0]) is None and not os.path.exists(command[0]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with _killed_behind() as (tied, stdin):
            running = subprocess.Popen(
                [*tied, *command], stdin=stdin, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
            assert running.stdout is not None
            with running.stdout as stdout:
                try:
                    read = _read_limited(running.pid, stdout.fileno(), time.monotonic() + _COMMAND_SECONDS)
                    if read is not None:
                        status = running.wait()
                finally:
                    if status is None:  # the leader has not been reaped, so the number of the group is still its own
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(running.pid, signal.SIGKILL)
                        running.wait()
        text = (read or b"").decode("ascii")
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{what}: {reason_of(error)}") from None
    if read is None:
        raise ConfigError(f"{what} took longer than {_COMMAND_SECONDS:g} s or printed more than 64 KiB")
    if status:
        raise ConfigError(f"{what} failed with status {status}")
    return text


@contextlib.contextmanager
def _killed_behind() -> Iterator[tuple[Sequence[str], int]]:
    """The start of a command and its input, with which its process group is killed if this process ends before the context
    does: a shell waits for the end of a pipe. Without a shell nothing does it."""
    try:
        shell = subprocess.Popen(
            ("/bin/sh", "-c", _KILLS_BEHIND),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
    except OSError:
        shell = None
    if shell is None or shell.stdin is None:
        yield (), subprocess.DEVNULL
        return
    try:
        yield _TIED, shell.stdin.fileno()
    finally:
        with contextlib.suppress(OSError):  # it was killed
            shell.stdin.write(b"done\n")
        shell.communicate()


def _read_limited(process: int, handle: int, deadline: float) -> bytes | None:
    """The output of a process when it has ended, though it is not reaped; None if it prints too much or takes too long.

    Its children may keep the output open, and not all of them are of its group: nothing here waits for the end of the output.
    """
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    read, output_ended = b"", False
    while time.monotonic() < deadline and len(read) <= _MAX_BYTES:
        # In this order: what the process printed before its end is there once it has ended.
        ended = _has_ended(process)
        if output_ended:
            if ended:
                return read
            time.sleep(_STEP_SECONDS)
        elif poll.poll(0 if ended else 1000 * _STEP_SECONDS):
            part = os.read(handle, _MAX_BYTES)
            read += part
            output_ended = not part
        elif ended:
            return read
    return None


def _has_ended(process: int) -> bool:
    """Whether a child has ended. It is not reaped here."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # where SIGCHLD is ignored, the system reaps
        return True
