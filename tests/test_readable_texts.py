"""Text that cannot be encoded, in responses and in the log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.api import sse
from foreword.api.errors import error_response
from foreword.api.front import Call
from foreword.api.sse import utf8
from foreword.errors import BadRequest, ForewordError
from foreword.texts import readable

sys.path.append(str(Path(__file__).parent / "serving"))
from small_front import Client, front, route

# "ü" and a byte that is no character, as a locale without UTF-8 gives them.
NAME = os.fsencode("ü").decode("ascii", "surrogateescape") + "\udcff"


@given(st.text(st.characters() | st.characters(categories=["Cs"])))
def test_any_text_can_be_encoded(text: str) -> None:
    """Any text becomes UTF-8; one that is UTF-8 as it is stays so."""
    assert utf8(text).decode() == readable(text)
    if "\ufffd" not in readable(text) and not any("\ud800" <= one <= "\udfff" for one in text):
        assert readable(text) == text


@given(st.binary())
def test_names_of_files_are_read_as_utf8(name: bytes) -> None:
    """The bytes of a name are shown as they are in UTF-8, whatever the locale has made of them."""
    assert readable(name.decode("ascii", "surrogateescape")) == name.decode("utf-8", "replace")


@pytest.mark.parametrize("error", [None, BadRequest(f"no {NAME}"), ForewordError(f"no {NAME}")])
def test_answers_have_readable_text(error: ForewordError | None) -> None:
    """An answer or an error with such a name, such as that of a model's folder, is sent with its characters."""

    async def handler(call: Call) -> dict[str, Any]:
        if error is not None:
            raise error
        return {"text": f"no {NAME}"}

    client = Client()
    asyncio.run(client.ask(front(route(handler))[0]))
    assert client.messages[0]["status"] == (200 if error is None else error.status)
    body = json.loads(client.messages[1]["body"])
    assert (body["text"] if error is None else body["error"]["message"]) == "no ü\ufffd"
    assert json.loads(error_response(error or BadRequest(NAME)).body)
    assert sse.encode({"text": NAME}) == 'data: {"text":"ü\ufffd"}\n\n'.encode()


_LOG = """
import logging
from foreword.api.http import configure_logging
configure_logging("info")
logging.info("reading %s", "\\udcc3\\udcbc")
"""


def test_lines_of_the_log_are_readable() -> None:
    """The log shows the characters of such a name, escaped where the terminal has none."""
    for encoding, shown in (("utf-8", "ü"), ("ascii", "\\xfc")):
        environ = {**os.environ, "PYTHONIOENCODING": f"{encoding}:backslashreplace"}
        done = subprocess.run([sys.executable, "-c", _LOG], env=environ, capture_output=True, check=True)
        assert done.stderr.decode(encoding).endswith(f"INFO reading {shown}\n")
