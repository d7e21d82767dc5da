"""Tokenizer and chat template, around a Transformers tokenizer. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from jinja2 import TemplateError

from foreword.errors import BadRequest
from foreword.request_errors import ModelNotFound
from foreword.tokens.detokenizer import TextStream, TokenTexts

# Arguments of `apply_chat_template` and variables that it sets.
_OWN_OPTIONS = frozenset(
    name
    for names in (
        "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize",
        "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs",
        "bos_token eos_token pad_token unk_token raise_exception strftime_now self",
    )
    for name in names.split()
)
_MAX_OPTIONS = 32
_MAX_OPTIONS_TEXT = 16_384
# Tokens beyond which decoding takes so long that it should release the GIL, as `decode_batch` does.
_LONG = 4096


_Parts = Sequence[Mapping[str, Any]]


class Tokenizer:
    """A model's tokenizer. Thread-safe for reading; one `TextStream` belongs to one sequence.

    Attributes:
        arrange: changes the order of messages and tools before they are rendered; None to leave it.
    """

    def __init__(self, inner: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise ModelNotFound("the model's tokenizer has no tokenizer.json (a 'fast' tokenizer); convert it first")
        self.arrange: Callable[[_Parts, _Parts], tuple[_Parts, _Parts]] | None = None
        self._inner = inner
        self._backend = backend
        self._texts = TokenTexts(backend)
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
    def chat_template(self) -> str:
        """The model's chat template; empty without one."""
        found = self._inner.chat_template
        return found if isinstance(found, str) else str((found or {}).get("default", ""))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Unlike `encode`, this releases the GIL, and computes no offsets.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def token_ends(self, text: str) -> list[int]:
        """Where each token of a text ends, in characters; without special tokens around the text."""
        return [end for _, end in self._backend.encode_batch([text], add_special_tokens=False)[0].offsets]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(tokens) > _LONG:
            return str(self._backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0])
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def complete_text(self, tokens: Sequence[int]) -> str:
        """The whole characters of a prompt: one that it leaves incomplete belongs to the output behind it (`stream`)."""
        return "".join(map(self.stream(()).push, tokens))

    def token_text(self, token: int) -> str:
        """A token as text; bytes that are not a whole character become U+FFFD."""
        text = self.decode([token], skip_special_tokens=False)
        # SentencePiece decoders drop the leading space at the start of a text.
        piece = self._backend.id_to_token(token) or ""
        return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        found = self._texts.bytes_of(token)
        return self.token_text(token).encode() if found is None else found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages, tools: as chat templates expect them (`api.chat_template` makes them).
            options: the client's own variables of the template (`chat_template_kwargs`).
            continue_final_message: leave the last message open, which is the assistant's.

        Raises BadRequest if the model has no chat template or it rejects the messages.
        """
        text = self.chat_text(
            messages,
            tools=tools,
            options=options,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation rendered by the chat template, to be encoded without special tokens. Arguments and errors as in
        `render_chat`."""
        if not self.has_chat_template:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        if continue_final_message and not (messages and messages[-1].get("role") == "assistant"):
            raise BadRequest("only a message of the assistant can be continued", param="continue_final_message")
        if self.arrange is not None:
            messages, tools = self.arrange(messages, tools)
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **_template_options(options),
            )
        except (
            TemplateError,
            TypeError,
            LookupError,
            ValueError,
            AttributeError,
            RecursionError,
            ArithmeticError,
        ) as error:
            raise BadRequest(f"the chat template rejects these messages: {error}", param="messages") from error
        return str(text)

    def bad_words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell these texts, at the start of a text and after a space."""
        spelled = [
            self.encode(text, add_special_tokens=False) for word in texts for text in (word, f" {word.lstrip()}")
        ]
        return tuple(dict.fromkeys(tuple(tokens) for tokens in spelled if tokens))

    def as_json(self) -> str:
        """The `tokenizer.json` of a Rust tokenizer, without truncation and padding."""
        from tokenizers import Tokenizer as RustTokenizer

        copy = RustTokenizer.from_str(self._backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        return str(copy.to_str())

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

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """The text of an output behind `prompt`, token by token."""
        return TextStream(self._texts, prompt, skip_special_tokens)


def _template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The client's variables of a chat template. Raises BadRequest for those that the engine sets itself."""
    taken = sorted(_OWN_OPTIONS.intersection(options))
    if taken:
        raise BadRequest(f"{taken[0]} is not a variable that a client may set", param="chat_template_kwargs")
    if len(options) > _MAX_OPTIONS or len(str(options)) > _MAX_OPTIONS_TEXT:
        limits = f"{_MAX_OPTIONS} variables and {_MAX_OPTIONS_TEXT} characters"
        raise BadRequest(f"there may be at most {limits}", param="chat_template_kwargs")
    return dict(options)


def _hides(other: str, token: str) -> bool:
    """Whether `other` can match in place of `token`: it contains `token`, or ends with the start of it."""
    if other != token and token in other:
        return True
    return any(token.startswith(other[-length:]) for length in range(1, min(len(other), len(token))))
