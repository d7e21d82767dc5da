"""Starts Python scripts without the time of their imports: a process that has imported modules forks for each script.

    python -P forks.py DESCRIPTOR MODULE ...

A script runs in a process and a session of its own, as if it had been started with its arguments, except that the modules are
imported (those that exist) and that Python's hash seed is that of this process. `process.py` sends requests over the Unix
socket DESCRIPTOR: four bytes of length with the descriptors of standard input, output, error and a report; then JSON with
`argv`, `variables` (more of the environment) and `path` (folders to search for modules first). The report gets two lines, the
process id and the exit status. Imports nothing of Foreword, so that any interpreter can run it.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any


def main() -> None:
    """Serve requests until the other end closes; in the process of a script, run it."""
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The collector would write to all pages that the processes share.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    # The kernel removes watchers that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        script = _serve(requests)
    if script is not None:
        os.environ.update(script["variables"])
        sys.argv[:] = script["argv"]
        sys.path[:0] = script["path"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns None at the end, and the request in the process of its script."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, 4, 4)
        if len(head) < 4:
            return None
        with requests.makefile("rb", buffering=0) as body:
            text = b""
            while len(text) < int.from_bytes(head):
                text += body.read(int.from_bytes(head) - len(text)) or sys.exit("half a request")
        if os.fork() == 0:
            requests.close()
            _become_script(descriptors)
            return json.loads(text)  # type: ignore[no-any-return]
        for descriptor in descriptors:
            os.close(descriptor)


def _become_script(descriptors: list[int]) -> None:
    """Fork once more. The child returns, with the standard streams of the request; this process waits for it and reports. It
    ends the child and its group when the report cannot be read any more: the process that asked for the script has died."""
    *streams, report = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the group of the process that asked
            signal.signal(number, signal.SIG_IGN)
        for stream in streams:
            os.close(stream)
        events = select.poll()
        events.register(ended := os.pidfd_open(process), select.POLLIN)
        events.register(report, 0)  # only that the pipe is broken
        if ended not in dict(events.poll()):
            for kill in (os.killpg, os.kill):  # it may not have its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.write(report, b"%d\n" % os.getpid())
    os.close(report)


if __name__ == "__main__":
    main()
