"""`LLM`: offline batches in one process, without a server."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, Unpack, cast

from tqdm import tqdm

from foreword.blocks.retention import MAX_PRIORITY, Retention, RetentionAnswer
from foreword.blocks.salt import NO_SALT, PUBLIC
from foreword.config_layers import build
from foreword.engine import preflight
from foreword.engine.request import Completion, Delta, Request, RequestOutput, SamplingParams
from foreword.engine_config import EngineConfig, EngineOptions, PrefixConfig
from foreword.entrypoints.engine_verbs import PREFETCH_SECONDS, EngineVerbs, Result, RetentionInfo
from foreword.errors import BadRequest, ForewordError
from foreword.events import Observer
from foreword.prefixes.book import Message, NamedPrefix
from foreword.store_config import EncryptionConfig, StoreConfig
from foreword.tokens.token_logprob import TokenLogprob
from foreword.transfer_config import TransferConfig

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


def _at_once(function: Callable[[], Result]) -> Result:
    """The engine's thread is the caller's."""
    return function()


def _tell(text: str) -> None:
    """Say what is being loaded, which takes seconds to minutes: in the log, or on a terminal if nothing is logged."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"foreword: {text}", file=sys.stderr)


class LLM:
    """A model, its KV cache and a loop in the calling thread.

    While it loads, lines on a terminal's standard error say what it does; with `logging` set up they are log lines of level
    INFO.

    Args:
        model: folder or Hugging Face name of the model; by default the embedded model.
        prefix_budget: KV memory that named prefixes may pin: a size (`1GiB`) or a share of the pool (`25%`).
        store: URL of a store, or several, the fastest first (docs/operations/operating.md). With a store, `close` the LLM in
            the end: it writes what is still queued.
        encryption: of what the stores keep.
        observers: called with each event of the cache.
        options: the fields of `EngineConfig`.

    Raises:
        ForewordError: an option that does not exist or has a wrong value, or a model that cannot be loaded.

    Examples:
        >>> llm = LLM()  # the embedded model; or LLM("path/to/model", dtype="float32")
        >>> [output] = llm.generate(["import "], SamplingParams(max_tokens=8, temperature=0.0))
        >>> output.outputs[0].text
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prefix_budget: str = "50%",
        store: str | Sequence[str] | StoreConfig = (),
        encryption: EncryptionConfig | None = None,
        observers: Sequence[Observer] = (),
        **options: Unpack[EngineOptions],
    ) -> None:
        config = build(EngineConfig, "engine", {"model": model, **options})
        if not isinstance(store, StoreConfig):
            store = StoreConfig(urls=(store,) if isinstance(store, str) else tuple(store))
        preflight.check(config, store, TransferConfig(), encryption)
        _tell(f"loading {config.model or 'the embedded model'}")
        from foreword.entrypoints.build_engine import build_engine  # imports torch, which takes seconds

        self._parts = build_engine(
            config,
            prefixes=PrefixConfig(prefix_budget),
            store=store,
            encryption=encryption,
            observers=observers,
            progress=_tell,
        )
        self.config = config
        self.info = self._parts.info
        self.tokenizer = self._parts.tokenizer
        self.offload = self._parts.offload
        self._core = self._parts.core
        self._ids = itertools.count()
        self._verbs = EngineVerbs(self._parts, _at_once)
        self._prefixes = self._verbs.prefixes
        self._prefixes.refresh(PUBLIC.tenant)
        self._prefixes.refresh()  # what an earlier process registered; its KV is computed or loaded when it is used

    def __repr__(self) -> str:
        info = self.info
        return f"LLM({info.name!r}, {info.dtype} on {info.device}, KV of {info.kv_tokens:,} tokens)"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefix: str | None = None,
        cache_report: bool = False,
        progress: bool = False,
        retain: Sequence[Retention] = (),
    ) -> list[RequestOutput]:
        """Continue prompts (text or token ids), all at once; outputs in the order of the prompts.

        `params` holds for all prompts or is a list, one each; by default the model's own (`info.sampling`). `prefix` names
        a text prefix that stands before every prompt.
        `retain`: which parts of every prompt are kept.
        A request that fails has an `error` in its output, and the others are not affected. Raises the error of the first one
        if all fail, and BadRequest before anything is computed if a prompt or a parameter is bad.
        """
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed = cast("Sequence[Prompt]", [prompts] if alone else prompts)
        tokens = [self._tokens(prompt, prefix) for prompt in listed]
        return self._run(tokens, params, prefix, cache_report, progress, retain)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefix: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] = MappingProxyType({}),
        continue_final_message: bool = False,
        cache_report: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of messages with `role` and `content`); one conversation may be given alone. `tools`,
        `template_options` and `continue_final_message` as in `Tokenizer.render_chat`."""
        alone = bool(conversations) and isinstance(conversations[0], Mapping)
        listed = cast("Sequence[Sequence[Message]]", [conversations] if alone else conversations)
        options: dict[str, Any] = {"tools": tools, "options": template_options}
        options["continue_final_message"] = continue_final_message
        tokens = []
        for messages in listed:
            before = () if prefix is None else self._prefixes.book.use(prefix, "messages").content
            tokens.append(self.tokenizer.render_chat([*cast("Sequence[Message]", before), *messages], **options))
        return self._run(tokens, params, prefix, cache_report, progress)

    def add_prefix(
        self,
        name: str,
        content: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        replace: bool = False,
    ) -> NamedPrefix:
        """Register a named prefix, compute its KV and pin it. Raises BadRequest, PromptTooLong, PrefixBudgetExceeded, or
        StoreError if no store takes its record."""
        with self._prefixes.register(name, content, messages, replace=replace) as registration:
            self._run_requests([self._verbs.computing(registration)])
            made = registration.finish()
        self._core.leases.settle()
        assert made is not None
        return made

    def retain(self, tokens: Sequence[int], ttl: float | None, priority: int = 0) -> RetentionAnswer:
        """Keep the KV of `tokens` for `ttl` seconds after its last use; it is computed or loaded if necessary."""
        [output] = self._run_requests([self._verbs.retaining(tokens, ttl, priority, NO_SALT)])
        return output.retained[0]

    def pin(self, tokens: Sequence[int]) -> RetentionAnswer:
        """Keep the KV of `tokens` until it is released."""
        return self.retain(tokens, None, MAX_PRIORITY)

    def prefetch(self, tokens: Sequence[int], *, seconds: float = PREFETCH_SECONDS) -> RetentionAnswer:
        """Load what the stores have of `tokens` to the device, and keep it there for some seconds. Nothing is computed."""
        answers: list[RetentionAnswer] = []
        self._verbs.prefetch(tokens, NO_SALT, seconds, answers.append)
        self._drain([])
        return answers[0]

    def release(self, tokens: Sequence[int] | None = None) -> list[RetentionInfo]:
        """End the retentions along a prompt, or all. Returns them."""
        released = self._verbs.release(tokens, NO_SALT)
        self._core.leases.settle()
        return released

    def list_prefixes(self) -> list[NamedPrefix]:
        return self._prefixes.book.list()

    def remove_prefix(self, name: str) -> NamedPrefix:
        """Remove a named prefix, here and in the stores. Raises UnknownPrefix, StoreError."""
        removed = self._prefixes.remove(name)
        self._core.leases.settle()
        return removed

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the stores have everything; False if `timeout` seconds were not enough. True without a store."""
        return self._parts.flush(timeout)

    def close(self) -> None:
        """Write what the stores do not have yet, and close them. Nothing to do without a store."""
        self._parts.close_stores()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clear_cache(self) -> int:
        """Forget all cached blocks that are not pinned; returns their number."""
        return self._verbs.clear()

    def check(self) -> None:
        """Prove the pool's invariants. Raises IntegrityError."""
        self._verbs.check()

    def _tokens(self, prompt: Prompt, prefix: str | None) -> list[int]:
        before = () if prefix is None else self._prefixes.book.use(prefix, "text").tokens
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=prefix is None)
        return [*before, *prompt]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prefix: str | None,
        cache_report: bool,
        progress: bool,
        retain: Sequence[Retention] = (),
    ) -> list[RequestOutput]:
        each = (
            [params or self.info.sampling_params({})] * len(prompts)
            if not isinstance(params, Sequence)
            else list(params)
        )
        if len(each) != len(prompts):
            raise BadRequest(f"{len(prompts)} prompts, but {len(each)} sets of parameters", param="params")
        requests = [
            Request(f"llm-{next(self._ids)}", tuple(tokens), one, want_cache_report=cache_report, retain=tuple(retain))
            for tokens, one in zip(prompts, each, strict=True)
        ]
        outputs = self._run_requests(requests, progress)
        if prefix is not None:
            for output in outputs:
                self._prefixes.book.note_hit(prefix, output.cached_tokens)
        return outputs

    def _run_requests(self, requests: Sequence[Request], progress: bool = False) -> list[RequestOutput]:
        for request in requests:
            self._core.validate(request)
        outputs = [_Output(request) for request in requests]
        with tqdm(total=len(requests), desc="prompts", unit="prompt", disable=not progress) as bar:
            try:
                for request in requests:
                    self._core.add(request)
                self._drain(outputs, bar)
            except BaseException:
                for request in requests:
                    self._core.abort(request.id)
                raise
        if outputs and all(output.error is not None for output in outputs):
            raise cast("ForewordError", outputs[0].error)
        return [output.finish() for output in outputs]

    def _drain(self, outputs: Sequence[_Output], bar: Any = None) -> None:
        by_id = {output.request.id: output for output in outputs}
        while self._core.has_work():
            for delta in self._core.step():
                output = by_id.get(delta.request_id)
                if output is None and delta.finish_reason == "error":
                    raise delta.failure
                if output is None or output.error is not None:
                    continue
                if output.add(delta) and bar is not None:
                    bar.update()
                if delta.finish_reason == "error":
                    self._core.abort(delta.request_id)  # its other sequences
        while self._core.idle_work():
            pass


@dataclasses.dataclass(slots=True)
class _Part:
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    last: Delta | None = None


class _Output:
    """Gathers one request's deltas."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cached_tokens = 0
        self.error: ForewordError | None = None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._parts = [_Part() for _ in range(request.params.n)]
        self._started = time.monotonic()
        self._first: float | None = None

    def add(self, delta: Delta) -> bool:
        """True if that was the request's last. A sequence that fails ends its request."""
        if self._first is None:
            self._first = time.monotonic() - self._started
        part = self._parts[delta.index]
        part.tokens += delta.tokens
        part.text.append(delta.text)
        part.logprobs += delta.logprobs
        if delta.index == 0:
            self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
            self.cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            part.last = delta
        if delta.finish_reason == "error":
            self.error = delta.failure
            return True
        return all(one.last is not None for one in self._parts)

    def finish(self) -> RequestOutput:
        completions = []
        for index, part in enumerate(self._parts):
            completions.append(
                Completion(
                    index,
                    tuple(part.tokens),
                    "".join(part.text),
                    tuple(part.logprobs),
                    "error" if part.last is None else part.last.finish_reason or "error",
                    None if part.last is None else part.last.stop_match,
                )
            )
        first = self._parts[0].last
        return RequestOutput(
            self.request.id,
            self.request.tokens,
            self.cached_tokens,
            tuple(completions),
            first.cache_report if first is not None else None,
            self._first or 0.0,
            first.retained if first is not None else (),
            self.prompt_logprobs,
            self.error,
        )
