"""Tokenizer, chat template and incremental detokenizer, around a Transformers tokenizer. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from foreword.errors import BadRequest, ModelNotFound

# Last tokens of the prompt that the text of the first new token may depend on (a leading space, half a character).
_CONTEXT_TOKENS = 8


class Tokenizer:
    """A model's tokenizer. Thread-safe for reading; one `TextStream` belongs to one sequence."""

    def __init__(self, inner: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise ModelNotFound("the model's tokenizer has no tokenizer.json (a 'fast' tokenizer); convert it first")
        self._inner = inner
        self._backend = backend
        self.vocab_size: int = len(inner)
        own = () if inner.eos_token_id is None else (int(inner.eos_token_id),)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_token_ids, *own)))

    @classmethod
    def load(cls, source: str, eos_token_ids: tuple[int, ...] = (), *, trust_remote_code: bool = False) -> Tokenizer:
        """From a folder or the hub. Raises ModelNotFound if there is none."""
        path = Path(source).expanduser()
        try:
            inner = transformers.AutoTokenizer.from_pretrained(
                path if path.is_dir() else source, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelNotFound(f"cannot load the tokenizer of {source!r}: {first}") from error
        return cls(inner, eos_token_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """One token as text; bytes that are not a whole character become U+FFFD."""
        text = self.decode([token], skip_special_tokens=False)
        # SentencePiece decoders drop the leading space at the start of a text.
        piece = self._backend.id_to_token(token) or ""
        return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
            return bytes([int(piece[3:5], 16)])
        if all(char in _BYTE_OF_CHAR for char in piece) and "\ufffd" in self.token_text(token):
            return bytes(_BYTE_OF_CHAR[char] for char in piece)
        return self.token_text(token).encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation. Raises BadRequest if the model has no chat template or it rejects the
        messages."""
        return self.encode(
            self.chat_text(messages, add_generation_prompt=add_generation_prompt), add_special_tokens=False
        )

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """A conversation rendered by the chat template, to be encoded without special tokens. Raises as
        `render_chat`."""
        if not self.has_chat_template:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise BadRequest(f"the chat template rejects these messages: {error}", param="messages") from error
        return str(text)

    def cuts(self) -> list[str]:
        """Special tokens before which a text can be cut: the parts, encoded separately without adding special tokens,
        give the same tokens as the whole text.

        A tokenizer finds added tokens first (the leftmost, and of those the longest), then normalizes and splits the
        text between them. A cut before an added token is therefore safe, unless its match depends on neighboring text
        (`lstrip`, `single_word`, `normalized`) or another added token that overlaps it can match instead.
        """
        backend = self._backend
        if backend.truncation is not None or backend.padding is not None or backend.encode_special_tokens:
            return []
        added = list(backend.get_added_tokens_decoder().values())
        texts = {one.content for one in added}
        independent = (one for one in added if not (one.lstrip or one.single_word or one.normalized) and one.content)
        return [one.content for one in independent if not any(_hides(other, one.content) for other in texts)]

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return TextStream(self, self._backend, prompt)


class TextStream:
    """Incremental detokenizer of one sequence: returns complete characters only."""

    __slots__ = ("_backend", "_pending", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, backend: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._stream = DecodeStream(ids=list(prompt[-_CONTEXT_TOKENS:]), skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that the token completes; empty for a part of a character."""
        text = self._stream.step(self._backend, token)
        if text is None:
            self._pending.append(token)
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """The text of the pending tokens, with U+FFFD for an incomplete character."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending) if pending else ""


def _hides(other: str, token: str) -> bool:
    """Whether `other` can match in place of `token`: it contains `token`, or ends with the start of it."""
    if other != token and token in other:
        return True
    return any(token.startswith(other[-length:]) for length in range(1, min(len(other), len(token))))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes (Radford et al. 2019), used in byte-level BPE vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
