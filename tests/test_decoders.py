"""Typed decoding in threads."""

import subprocess
import sys
from typing import Any, Literal

import msgspec
import pytest

from foreword.decoders import convert

# Each round has new types, which four threads need at once. Switching often makes the race likely within a few rounds.
RACE = """
import sys, threading
import msgspec
from foreword.decoders import convert, decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
for _ in range(200):
    inner = [msgspec.defstruct(f"Inner{i}", [("x", "int | None", None), ("y", "list[str] | None", None)]) for i in range(8)]
    outer = msgspec.defstruct("Outer", [(f"f{i}", kind | None, None) for i, kind in enumerate(inner)])
    value = {f"f{i}": {"x": i} for i in range(8)}
    start, found = threading.Barrier(4), []

    def decode(number):
        start.wait()
        if number % 3 == 0:
            found.append(decode_json(msgspec.json.encode(value), outer))
        elif number % 3 == 1:
            found.append(decode_msgpack(msgspec.msgpack.encode(value), outer))
        else:
            found.append(convert(value, outer))

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 4 and all(one.f7.x == 7 for one in found), found
"""


def test_threads_may_need_a_type_at_once() -> None:
    """The first use of a type by several threads decodes rightly. msgspec alone ends the process with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


class Order(msgspec.Struct):
    word: Literal["one", "two"] = "one"
    count: int = 0


@pytest.mark.parametrize(
    "value",
    [
        {"word": "\ud800"},
        {"\ud800": 1, "word": "three"},
        {"word": 1},
        {"count": "\ud800"},
        "\ud800",
    ],
)
def test_what_does_not_fit(value: Any) -> None:
    """Decoded values that do not fit a type are one error, also with half characters, which JSON may hold."""
    with pytest.raises(msgspec.ValidationError):
        convert(value, Order)
