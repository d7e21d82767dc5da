"""Traces: read, copied, sampled, and divided between tenants.

A trace has one request per line of JSON, in one of two formats. Unknown keys are ignored.

- **Blocks**, the format of Mooncake and of recordings (`--record`): `timestamp` in milliseconds, `input_length`,
  `output_length`, and `hash_ids` with one number per block of `block_size` tokens (default 512). Equal numbers mean equal
  prefixes up to and including that block. Blocks of the output may follow those of the prompt.
- **Agent sessions**: `timestamp` in microseconds, `input` and `output` as text, `session_id`. Four bytes of text count as one
  token.

`session`, `tenant` and `priority` (a whole number) are optional. A file that
gzip has compressed is read as it is.

Mooncake's traces do not contain the blocks of outputs. If a later prompt starts with all full blocks of an earlier one and is
at least as long as that prompt and its output, it counts as the next turn of the conversation, and the output is what follows
the earlier prompt in it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from foreword.config import read_text
from foreword.errors import ConfigError, did_you_mean, reason_of

_KEYS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "share": (float, r"\d{1,9}(\.\d{1,9})?"),
    "priority": (int, r"-?\d{1,9}"),
}


@dataclass(frozen=True, slots=True)
class TenantRule:
    """A tenant that sends a part of a trace.

    Attributes:
        share: of the sessions, relative to the shares of the other tenants.
        priority: of its requests; lower numbers are more urgent, as in vLLM. None: as in the trace.
    """

    name: str
    share: float = 1.0
    priority: int | None = None


def parse_tenant(text: str) -> TenantRule:
    """`"team-a share=3 priority=5"`. Raises ConfigError."""
    name, *pairs = text.split() or [""]
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in _KEYS:
            raise ConfigError(
                f"--tenant {name}: {key} is not a key; choose from share, priority{did_you_mean(key, _KEYS)}"
            )
        kind, form = _KEYS[key]
        if not re.fullmatch(form, value):
            raise ConfigError(f"--tenant {name}: {key} takes a number, not {value!r}")
        values[key] = kind(value)
    if not name or "=" in name or not values.get("share", 1.0) > 0:
        raise ConfigError(f"--tenant {text!r}: write NAME and any of share=N (more than 0) and priority=N")
    return TenantRule(name, **values)


def with_tenants(trace: Sequence[TraceRequest], rules: Sequence[TenantRule], *, seed: int = 1) -> list[TraceRequest]:
    """Divide the sessions of a trace at random between tenants, by their shares.

    Without sessions, requests belong together whose first block outside of a common prompt is the same; blocks that more than
    half of the requests have are common. Raises ConfigError for a trace that names its tenants, and for two rules of one name.
    """
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigError(f"--tenant: two tenants have one name: {', '.join(names)}")
    if not rules:
        return list(trace)
    if any(one.tenant for one in trace):
        raise ConfigError("--tenant: the trace names the tenants of its requests already")
    counts = Counter(number for one in trace for number in set(one.ids))
    common = {number for number, count in counts.items() if 2 * count > len(trace)}
    rng, chosen = random.Random(seed), dict[object, TenantRule]()
    found = []
    for one in trace:
        group = one.session or next((number for number in one.ids if number not in common), -1)
        if group not in chosen:
            [chosen[group]] = rng.choices(rules, [rule.share for rule in rules])
        rule = chosen[group]
        priority = one.priority if rule.priority is None else rule.priority
        found.append(replace(one, tenant=rule.name, priority=priority))
    return found


_BLOCK_TOKENS: Final = 512
_FORMATS: Final = (
    "the formats are Mooncake's blocks (hash_ids, also written by --record) and agent sessions (input, output, session_id), "
    "see docs/reference/formats.md"
)
# Larger numbers stand for unknown output tokens (`sim/sequence_tokens.py`).
_LARGEST_ID: Final = (1 << 31) - 1
_TEXT_BYTES: Final = 4
# Minimum number of full blocks of a prompt to recognize its next turn: shorter ones are shared by many prompts.
_MIN_TURN_BLOCKS: Final = 2
_COPY_SECONDS: Final = 60.0
# A block that more of the requests have says nothing about which of them belong together.
_RARE: Final = 0.01
# Larger times are a mistake of the unit.
_MOST_SECONDS: Final = 1e11
_GZIP: Final = b"\x1f\x8b"
# Most bytes of an unpacked file: a few compressed kilobytes may stand for any number of bytes.
_MOST_BYTES: Final = 4 << 30
_MOST_LINE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request.

    Attributes:
        arrival: seconds since the trace began.
        ids: one number per `ids_tokens` tokens of prompt and output. They cover the whole prompt and the known part of the
            output.
        prompt_tokens, output_tokens: lengths, at least 1.
        session: name of the session, if the trace contains it.
        tenant: its name; tenants share no blocks. Empty if there are none.
        priority: lower numbers are more urgent, as in vLLM.
    """

    arrival: float
    ids: Sequence[int]
    ids_tokens: int
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    tenant: str = ""
    priority: int = 0

    def prompt(self) -> array[int]:
        """Tokens of the prompt. Prompts share the same prefixes as the real ones."""
        return self.tokens(0, self.prompt_tokens)

    def output(self) -> array[int]:
        """The known tokens of the output."""
        return self.tokens(self.prompt_tokens, self.prompt_tokens + self.output_tokens)

    def tokens(self, start: int, end: int) -> array[int]:
        """The known tokens of prompt and output from number `start` to before `end`."""
        size = self.ids_tokens
        if size == 1:
            return array("I", self.ids[start:end])
        found: array[int] = array("I")
        for one in self.ids[start // size : -(-end // size)]:
            found.extend(array("I", (one,)) * size)
        return found[start % size : start % size + end - start]


def read_trace(paths: Path | Iterable[Path], *, speed: float = 1.0) -> list[TraceRequest]:
    """The requests of one or more files, in order of arrival. All files start at time 0.

    With `speed` 2.0, requests arrive twice as fast. Raises ConfigError with file and line for an invalid trace.
    """
    if not 1e-6 <= speed <= 1e6:
        raise ConfigError(f"the speed of a trace must be from 0.000001 to 1000000, not {speed}")
    found: list[TraceRequest] = []
    numbers: dict[int, int] = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        requests = [request for _, request in read_lines(path, numbers)]
        start = min((one.arrival for one in requests), default=0.0)
        ordered = sorted(requests, key=lambda one: one.arrival)
        found += [replace(one, arrival=(one.arrival - start) / speed) for one in _with_outputs(ordered)]
    if not found:
        raise ConfigError("the trace has no requests")
    return sorted(found, key=lambda one: one.arrival)


def multiplied(trace: Sequence[TraceRequest], copies: int, *, seed: int = 1) -> list[TraceRequest]:
    """A trace of blocks `copies` times at once, for a larger fleet: other users with the same behaviour.

    The copies begin at random times within a minute. Blocks that more than half of the requests have, such as a system prompt,
    are the same in all copies. Raises ConfigError for single tokens, or for more copies than there are numbers for blocks.
    """
    if copies < 1:
        raise ConfigError(f"the number of copies must be at least 1, not {copies}")
    if copies == 1:
        return list(trace)
    if any(one.ids_tokens == 1 for one in trace):
        raise ConfigError("only traces of blocks can be copied, not agent sessions with text")
    counts = Counter(number for one in trace for number in set(one.ids))
    if len(counts) * copies > _LARGEST_ID:
        raise ConfigError(f"{copies} copies of a trace with {len(counts)} blocks are too many")
    dense = {number: i for i, number in enumerate(counts)}
    common = {i for i, count in enumerate(counts.values()) if 2 * count > len(trace)}
    trace = [replace(one, ids=array("I", [dense[number] for number in one.ids])) for one in trace]
    rng = random.Random(seed)
    found: list[TraceRequest] = []
    for copy in range(copies):
        start, shift = rng.uniform(0, _COPY_SECONDS), copy * len(dense)
        for one in trace:
            ids = array("I", [number if number in common else number + shift for number in one.ids])
            session = None if one.session is None else f"{copy}-{one.session}"
            found.append(replace(one, arrival=start + one.arrival, ids=ids, session=session))
    found.sort(key=lambda one: one.arrival)
    return found


def sampled(trace: Sequence[TraceRequest], parts: int, *, seed: int = 1) -> list[TraceRequest]:
    """A part of a trace, one of `parts`, for as many times fewer replicas: whole sessions.

    Of sessions with about as many tokens, in the order of their arrival, every `parts`-th is taken, so that the sample has its
    share of the work at each time: drawn one by one, sessions would bring a small sample more bursts than the whole has.
    `seed` decides with which ones this begins. Requests without a session belong together if the first block is the same that
    at most one in a hundred requests has: then the sample has the requests that share a document, and some of all that share a
    system prompt. Raises ConfigError if no request is left, and for text without sessions.
    """
    if parts < 1:
        raise ConfigError(f"--sample must be at least 1, not {parts}")
    if parts == 1:
        return list(trace)
    if any(one.ids_tokens == 1 and one.session is None for one in trace):
        raise ConfigError("--sample takes whole sessions: a trace with text needs session_id in each request")
    counts = Counter(number for one in trace for number in set(one.ids) if one.session is None)
    most, rng = max(_RARE * len(trace), 1), random.Random(seed)
    groups = [
        one.session or next((number for number in one.ids if counts[number] <= most), one.ids[-1]) for one in trace
    ]
    tokens = Counter[object]()
    for one, group in zip(trace, groups, strict=True):
        tokens[group] += one.prompt_tokens + one.output_tokens
    turns = defaultdict[int, Iterator[int]](lambda: itertools.count(rng.randrange(parts)))  # by the size of sessions
    taken = {group for group, size in tokens.items() if not next(turns[size.bit_length()]) % parts}
    found = [one for one, group in zip(trace, groups, strict=True) if group in taken]
    if not found:
        raise ConfigError(f"--sample {parts}: the trace is too short, no session is left of it")
    return found


def block_size_of(trace: Sequence[TraceRequest], preferred: int | None) -> int:
    """The block size for a trace: its own, or, if the trace has single tokens, `preferred` or 16."""
    coarsest = max(one.ids_tokens for one in trace)
    return coarsest if coarsest > 1 else preferred or 16


def read_lines(path: Path, numbers: dict[int, int]) -> Iterator[tuple[Mapping[str, Any], TraceRequest]]:
    """Each line of a file: its fields, and the request.

    `numbers` maps the 53-bit ids of recordings to small numbers, the same for all files.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            yield fields, _parse_blocks(fields, numbers) if "hash_ids" in fields else _parse_text(fields)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            reason = "it is not JSON" if isinstance(error, json.JSONDecodeError) else reason
            raise ConfigError(
                f"{path}, line {number}: not a request of a known trace format: {reason}; {_FORMATS}"
            ) from error


def _lines(path: Path) -> Iterable[str]:
    """The lines of a file. Raises ConfigError if it cannot be read, or has too many bytes once decompressed."""
    try:
        with path.open("rb") as file:
            compressed = file.read(len(_GZIP)) == _GZIP
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {reason_of(error)}") from None
    return _decompressed(path) if compressed else read_text(path, "the trace").split("\n")


def _decompressed(path: Path) -> Iterator[str]:
    left = _MOST_BYTES
    try:
        with gzip.open(path) as file:
            while line := file.readline(_MOST_LINE + 1):
                left -= len(line)
                if len(line) > _MOST_LINE:
                    raise ConfigError(f"the trace {path} has a line of more than {_MOST_LINE >> 20} MiB")
                if left < 0:
                    raise ConfigError(
                        f"the trace {path} has more than {_MOST_BYTES >> 30} GiB once decompressed: split it"
                    )
                yield line.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {reason_of(error)}") from None


def _with_outputs(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Take unknown outputs from the prompt of the next turn, if there is one."""
    waiting: dict[tuple[int, int, int], list[int]] = {}
    found = list(requests)
    for number, request in enumerate(requests):
        size, full = request.ids_tokens, request.prompt_tokens // request.ids_tokens
        for depth in range(1, full + 1):
            ended = waiting.pop((size, depth, request.ids[depth - 1]), ())
            for earlier in ended:
                before = requests[earlier]
                length = before.prompt_tokens + before.output_tokens
                if depth < len(request.ids) and length <= request.prompt_tokens:
                    found[earlier] = replace(before, ids=request.ids[: -(-length // size)])
        if full >= _MIN_TURN_BLOCKS and len(request.ids) * size < request.prompt_tokens + request.output_tokens:
            waiting.setdefault((size, full, request.ids[full - 1]), []).append(number)
    return found


def _parse_blocks(fields: Mapping[str, Any], numbers: dict[int, int]) -> TraceRequest:
    ids, size = fields["hash_ids"], int(fields.get("block_size", _BLOCK_TOKENS))
    if max(ids, default=0) > _LARGEST_ID:
        ids = [_LARGEST_ID - numbers.setdefault(one, len(numbers)) for one in ids]
    length = max(int(fields["input_length"]), 1)
    output = max(int(fields["output_length"]), 1)
    least = -(-length // max(size, 1))
    if size < 1 or not least <= len(ids) <= -(-(length + output) // size):
        raise ValueError(f"{length} tokens are {least} blocks of {size}, not {len(ids)}")
    session = fields.get("session")
    return TraceRequest(
        _seconds(fields, 1e3),
        array("I", ids),
        size,
        length,
        output,
        None if session is None else str(session),
        *_sender(fields),
    )


def _parse_text(fields: Mapping[str, Any]) -> TraceRequest:
    prompt, output = str(fields["input"]), str(fields["output"])
    length = len(_text_tokens(prompt))
    tokens = _text_tokens(prompt + output)
    session = fields.get("session_id")
    return TraceRequest(
        _seconds(fields, 1e6),
        tokens,
        1,
        length,
        max(len(tokens) - length, 1),
        None if session is None else str(session),
        *_sender(fields),
    )


def _seconds(fields: Mapping[str, Any], per_second: float) -> float:
    seconds = float(fields["timestamp"]) / per_second
    if not abs(seconds) <= _MOST_SECONDS:
        raise ValueError(f"the timestamp {fields['timestamp']} is not a time")
    return seconds


def _sender(fields: Mapping[str, Any]) -> tuple[str, int]:
    tenant, priority = fields.get("tenant", ""), fields.get("priority", 0)
    if not isinstance(tenant, str) or not isinstance(priority, int):
        raise ValueError("tenant must be a text and priority a whole number")
    return tenant, priority


def _text_tokens(text: str) -> array[int]:
    data = text.encode()
    whole = array("I", data[: len(data) // _TEXT_BYTES * _TEXT_BYTES])
    if sys.byteorder == "big":  # pragma: no cover - the same tokens on all machines
        whole.byteswap()
    rest = data[len(whole) * _TEXT_BYTES :]
    if rest or not whole:
        whole.append(int.from_bytes(rest, "little"))
    return whole
