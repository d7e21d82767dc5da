"""A short campaign of strangers at every port, and a test of the campaign itself."""

from __future__ import annotations

import re
import socket
import threading

import pytest
import stranger_campaign
from stranger_campaign import Row, Storm, run


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_short_campaign() -> None:
    """1,000 messages to each port: strangers learn nothing, no process grows by more than 16 MiB, clients with a key are
    served all the time, and no log has a traceback."""
    rows = run(7000, seed=20)
    assert len(rows) == 7
    for row in rows:
        assert row.messages == 1000 and not row.learned and row.good, row


def test_the_campaign_notices_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that tells strangers a secret is reported, however the secret is cut."""
    for name in ("PATIENCE", "QUIET"):  # the port ends exchanges by closing them
        monkeypatch.setattr(stranger_campaign, name, 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def tell() -> None:
            for _ in range(3):
                client = listener.accept()[0]
                client.recv(100)  # a port that closes without reading resets the connection
                for part in (b"the sec", b"ret is here"):
                    client.sendall(part)
                client.close()

        thread = threading.Thread(target=tell)
        thread.start()
        row = Row("telling")
        storm = Storm(listener.getsockname()[1], re.compile(b"secret"), row)
        for ends in ("wait", "half", "wait"):
            storm.send([b"hello"], ends, 1)
        storm.close()
        thread.join(60)
    assert row.learned == 3 and not row.good
