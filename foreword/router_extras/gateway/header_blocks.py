"""Decodes header blocks of HTTP/2 (HPACK, RFC 7541). A block is bounded by what it says, not only by its bytes: an index of one
byte may name a header of thousands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

# The most that a block may say, counted as HTTP/2 does.
MAX_LIST_BYTES: Final = 64 << 10
_TABLE_BYTES: Final = 4096
_ENTRY_BYTES: Final = 32

_LISTED: Final = (
    ":authority :method :method :path :path :scheme :scheme :status :status :status :status :status :status :status "
    "accept-charset accept-encoding accept-language accept-ranges accept access-control-allow-origin age allow "
    "authorization cache-control content-disposition content-encoding content-language content-length content-location "
    "content-range content-type cookie date etag expect expires from host if-match if-modified-since if-none-match if-range "
    "if-unmodified-since last-modified link location max-forwards proxy-authenticate proxy-authorization range referer "
    "refresh retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate"
)
_VALUES: Final = {
    **dict(enumerate(b"GET POST / /index.html http https 200 204 206 304 400 404 500".split(), 2)),
    16: b"gzip, deflate",
}
_STATIC: Final = tuple([(name.encode(), _VALUES.get(number, b"")) for number, name in enumerate(_LISTED.split(), 1)])

# Symbols of the Huffman code by the length of their codes, which ascend with the symbols. The last one ends no text.
_END: Final = 256
_SYMBOLS: Final[dict[int, tuple[int, ...]]] = {
    5: tuple(b"012aceiost"),
    6: tuple(b" %-./3456789=A_bdfghlmnpru"),
    7: tuple(b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    8: tuple(b"&*,;XZ"),
    10: tuple(b'!"()?'),
    11: tuple(b"'+|"),
    12: tuple(b"#>"),
    13: tuple(b"\0$@[]~"),
    14: tuple(b"^}"),
    15: tuple(b"<`{"),
    19: (92, 195, 208),
    20: (128, 130, 131, 162, 184, 194, 224, 226),
    21: (153, 161, 167, 172, 176, 177, 179, 209, 216, 217, 227, 229, 230),
    22: (
        *(129, 132, 133, 134, 136, 146, 154, 156, 160, 163, 164, 169, 170, 173, 178, 181, 185, 186, 187, 189, 190, 196),
        *(198, 228, 232, 233),
    ),
    23: (
        *(1, 135, 137, 138, 139, 140, 141, 143, 147, 149, 150, 151, 152, 155, 157, 158, 165, 166, 168, 174, 175, 180),
        *(182, 183, 188, 191, 197, 231, 239),
    ),
    24: (9, 142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237),
    25: (199, 207, 234, 235),
    26: (192, 193, 200, 201, 202, 205, 210, 213, 218, 219, 238, 240, 242, 243, 255),
    27: (203, 204, 211, 212, 214, 221, 222, 223, 241, *range(244, 249), *range(250, 255)),
    28: (*range(2, 9), 11, 12, *range(14, 22), *range(23, 32), 127, 220, 249),
    30: (10, 13, 22, _END),
}
_LONGEST: Final = 30
_PAD: Final = bytes([255] * 4)


def _classes() -> tuple[list[int], list[tuple[int, int, tuple[int, ...]]]]:
    """For each length of codes: the end of its codes as numbers of 30 bits; then the length, its first code, its symbols."""
    ends, found, code, before = list[int](), list[tuple[int, int, tuple[int, ...]]](), 0, 0
    for length, symbols in _SYMBOLS.items():
        code <<= length - before
        found.append((length, code, symbols))
        code, before = code + len(symbols), length
        ends.append(code << (_LONGEST - length))
    return ends, found


_ENDS, _CLASSES = _classes()


class HeaderFault(Exception):
    """A block that is none, or that says too much. The connection cannot go on: its tables are not those of its peer."""


class HeaderDecoder:
    """Decodes the blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._table: deque[tuple[bytes, bytes]] = deque()  # the newest first
        self._used, self._most = 0, _TABLE_BYTES

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Names and values. Raises HeaderFault."""
        try:
            return self._decode(block)
        except IndexError:
            raise HeaderFault("the block has no end, or names what is not in the table") from None

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        at, said, found = 0, 0, list[tuple[bytes, bytes]]()
        while at < len(block):
            first = block[at]
            if first & 0x80:
                number, at = _number(block, at, 7)
                header = self._known(number)
            elif first & 0xE0 == 0x20:
                self._most, at = _number(block, at, 5)
                if found or self._most > _TABLE_BYTES:
                    raise HeaderFault("a change of the table's size that is not allowed")
                self._shrink()
                continue
            else:
                kept = bool(first & 0x40)
                number, at = _number(block, at, 6 if kept else 4)
                if number:
                    name = self._known(number)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                header = name, value
                if kept:
                    self._keep(header)
            said += _size(header)
            if said > MAX_LIST_BYTES:
                raise HeaderFault("the headers are too large")
            found.append(header)
        return found

    def _known(self, number: int) -> tuple[bytes, bytes]:
        if not number:
            raise HeaderFault("there is no header with the number 0")
        return _STATIC[number - 1] if number <= len(_STATIC) else self._table[number - len(_STATIC) - 1]

    def _keep(self, header: tuple[bytes, bytes]) -> None:
        self._table.appendleft(header)
        self._used += _size(header)
        self._shrink()

    def _shrink(self) -> None:
        while self._used > self._most:
            self._used -= _size(self._table.pop())


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + _ENTRY_BYTES


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number whose first byte has so many bits of it, and where it ends."""
    most = (1 << bits) - 1
    value = block[at] & most
    if value < most:
        return value, at + 1
    for step in range(4):
        byte = block[at + 1 + step]
        value += (byte & 0x7F) << 7 * step
        if byte < 0x80:
            return value, at + 2 + step
    raise HeaderFault("a number is too large")


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    coded = block[at] & 0x80
    length, at = _number(block, at, 7)
    end = at + length
    if end > len(block):
        raise HeaderFault("a text has no end")
    return _huffman(block[at:end]) if coded else block[at:end], end


def _huffman(data: bytes) -> bytes:
    """A text from its code, which ends within the last byte; what follows in it are ones."""
    found, left, have, window = bytearray(), 8 * len(data), 0, 0
    for byte in data + _PAD:
        window, have = window << 8 | byte, have + 8
        while have >= _LONGEST and left:
            head = window >> (have - _LONGEST)
            length, first, symbols = _CLASSES[bisect_right(_ENDS, head)]
            if length > left:
                if left > 7 or head >> (_LONGEST - left) != (1 << left) - 1:
                    raise HeaderFault("a text that ends within a character")
                return bytes(found)
            symbol = symbols[(head >> (_LONGEST - length)) - first]
            if symbol == _END:
                raise HeaderFault("a text with its own end in it")
            found.append(symbol)
            have, left = have - length, left - length
            window &= (1 << have) - 1
    return bytes(found)
