"""Tokenizers of every kind that models have, trained on a little text, and what their tokens say, computed another way."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

SCRIPTS = {
    "emoji": "I like 🚀 and 👩‍👩‍👧‍👦, 🏳️‍🌈 too 😀",
    "chinese": "天地玄黄宇宙洪荒 𠀀𠮷",
    "burmese": "မင်္ဂလာပါ ကမ္ဘာ",
    "mathematics": "𝔘𝔫𝔦 ∀x∈ℝ ⌈x⌉",
    "arabic": "مرحبا بالعالم",
    "hebrew": "שלום עולם",
    "hindi": "नमस्ते दुनिया",
    "korean": "안녕하세요 세계",
    "japanese": "こんにちは世界",
    "amharic": "ሰላም ልዑል",
}
CORPUS = ["def hello(self): return 'world' of the rings, in the hat, and then that", *SCRIPTS.values()] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|start|>"]


def _fast(inner: RustTokenizer, **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def _bpe(size: int, **options: Any) -> Any:
    return trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)


def byte_level() -> Any:
    """The kind of GPT-2, Llama 3 and Qwen, with two added tokens that are not special."""
    inner = RustTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, _bpe(420, initial_alphabet=alphabet, special_tokens=SPECIAL))
    inner.add_tokens(["<think>", "｜起▁｜"])
    return _fast(inner, eos_token="</s>")


def byte_fallback(*, strip: bool = True) -> Any:
    """The kind of Llama 2 and Mistral; without `strip` that of Gemma."""
    inner = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fallback = [f"<0x{value:02X}>" for value in range(256)]
    ascii_only = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    inner.train_from_iterator(ascii_only, _bpe(400, special_tokens=[*SPECIAL, *fallback]))
    # Byte tokens are tokens of the model, not added ones.
    state = json.loads(inner.to_str())
    state["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in SPECIAL]
    inner = RustTokenizer.from_str(json.dumps(state))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _fast(inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> Any:
    """The kind of T5 and XLNet."""
    inner = RustTokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return _fast(inner, eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    """The kind of BERT."""
    inner = RustTokenizer(models.WordPiece(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    inner.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    return _fast(inner, eos_token="</s>", unk_token="<unk>")


def suffixed() -> Any:
    """The kind of the first GPT: the last token of a word has a suffix."""
    inner = RustTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    inner.train_from_iterator(CORPUS, _bpe(300, special_tokens=SPECIAL, end_of_word_suffix="</w>"))
    return _fast(inner, eos_token="</s>", unk_token="<unk>")


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, no strip": lambda: byte_fallback(strip=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "suffixed": suffixed,
}
_BYTES = {char: value for value, char in bytes_to_unicode().items()}


def spelled(kind: str, tokenizer: Any, tokens: Sequence[int], skip_special: bool) -> list[bytes]:
    """The bytes of each token of a text, as the kind of vocabulary defines them."""
    found: list[bytes] = []
    before: str | None = None  # the last token with text
    for token in tokens:
        piece = tokenizer.convert_ids_to_tokens(token)
        if piece is None or (piece in SPECIAL and skip_special):
            found.append(b"")
            continue
        if kind == "byte level":
            raw = bytes(map(_BYTES.__getitem__, piece)) if _BYTES.keys() >= set(piece) else piece.encode()
        elif kind.startswith("byte fallback") and len(piece) == 6 and piece.startswith("<0x"):
            raw = bytes([int(piece[3:5], 16)])
        elif kind.startswith("byte fallback") or kind == "unigram":
            text = piece.replace("\u2581", " ")
            strips = before is None and "no strip" not in kind
            raw = (text[1:] if strips and text.startswith(" ") else text).encode()
        elif kind == "wordpiece":
            joins = before is None or piece.startswith("##")
            raw = ((piece if before is None else piece[2:]) if joins else f" {piece}").encode()
        else:
            # The last token of a word ends with a space, unless it is the last of the text.
            space = " " if before is not None and before.endswith("</w>") else ""
            raw = (space + piece.removesuffix("</w>")).encode()
        before = piece
        found.append(raw)
    return found


def text_behind(kind: str, tokenizer: Any, prompt: Sequence[int], output: Sequence[int], skip_special: bool) -> str:
    """The text of an output behind a prompt: all bytes are decoded at once, and the prompt's complete characters go."""
    pieces = spelled(kind, tokenizer, [*prompt, *output], skip_special)
    before = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces[: len(prompt)]))
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert whole.startswith(before)
    return whole[len(before) :] if any(pieces[len(prompt) :]) else ""
