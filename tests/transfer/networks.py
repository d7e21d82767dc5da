"""A network of this test's own, in which NIXL may bind what it likes, and whether NIXL is here at all."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from foreword.transfer.nixl_agent import missing

LINKS = {"tcp": ("tcp",), "shm": ("shm", "tcp"), "nixl": ("nixl", "tcp")}
over_each_link = pytest.mark.parametrize("links", LINKS.values(), ids=LINKS)
CLONE_NEWNET = 0x40000000


def private_network() -> Iterator[None]:
    """This thread, and those that it starts, see nothing but a loopback interface. Skips where NIXL or the right is missing."""
    if reason := missing():
        pytest.skip(reason)
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and ip")
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip("no network namespaces can be made here")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)
