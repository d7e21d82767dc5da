"""The checks of `foreword explain`: it follows a prompt to its KV in a store and back, through one server, or through a
router and then behind it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from foreword.cli.probe import NoAnswer, ProbeAnswer, ProbedServer, body_of, error_of, new_prompt
from foreword.observability.scrape import Kind, Scrape, metric
from foreword.offload.counters import LookupCounts, OffloadStatus
from foreword.store.background import at_once
from foreword.store.tier_counters import TierCounters

_WRITE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
_SHARED_SECONDS: Final = 3.0
_BLOCKS: Final = 4
_AT_ONCE: Final = 8  # several connections reach several servers behind one address
_FEWEST_TOKENS: Final = 129
_MOST_TOKENS: Final = 4096
DEFAULT_BLOCK: Final = 16
_REPLICAS: Final = 4
# Policies that place a prompt without a look at what is cached.
_BLIND: Final = ("random", "round-robin", "least-loaded", "least-tokens")
# Names of the same counters at a server and at vLLM's connector.
_COUNTERS: Final = {
    "written": (TierCounters, "written_blocks"),
    "errors": (TierCounters, "errors"),
    "refused": (TierCounters, "refused"),
    "dropped": (OffloadStatus, "dropped"),
    "lookups": (LookupCounts, "lookups"),
    "declined": (OffloadStatus, "declined"),
    "cut": (OffloadStatus, "cut"),
    "stopped": (OffloadStatus, "stopped"),
}
_STATES: Final = {
    "off": ("is off: calls fail, see the log of the server", "the store's URL, or the server or disk behind it"),
    "full": ("finds no room for blocks", "`size=` in the store's URL, the room on its disk, or Redis's `maxmemory`"),
    "suspended": ("is suspended: an audit found a wrong block that came from it", "docs/operations/audit.md"),
}
_BETWEEN: Final = "what stands between here and the server; the server's log"
_REFUSED: Final = {
    413: "`--max-body`",
    429: "`--quota`, `--max-queue`",
    503: "what is said of each replica, or a time limit of the router",
    504: "the replicas: their `--quota` and `--max-queue`, and what keeps them busy; `--request-timeout` of the router",
}
# Tokenizers differ in the number of its tokens.
_TEXT: Final = "Which way is north? Über 1024 Wege, π/2 weit: {'a': [1, 2]}\n" * 8
# The cause where calls have failed with these errors.
_KEYS: Final = {
    "store_without_keys": "`--encryption-key-store`, or the server or disk behind it",
    "block_foreign": "the secrets, `--encryption-master-key-file` and release: the same for all servers of a store",
}
_RULES: Final = {
    "short": "`min_tokens=` in the store's URL",
    "first_use": "`admit=second` in the store's URL",
    "answer": "`admit=` in the store's URL",
    "rate": "`write_rate=` in the store's URL",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Finding of a check about one step on the way of a prompt's KV to a store and back.

    Attributes:
        ok: None if it could not be looked at, or holds with a restriction.
        setting: what to change if it is broken.
    """

    name: str
    text: str
    ok: bool | None = True
    setting: str = ""


class CheckFailed(Exception):  # control flow; never leaves `until_failed`
    """A check failed, which ends the command. `setting`: what to change."""

    def __init__(self, name: str, text: str, setting: str) -> None:
        super().__init__(text)
        self.result = CheckResult(name, text, False, setting)


class Checks:
    """The checks that servers and routers share: a prompt is sent, sent again, and sent with another salt."""

    block = DEFAULT_BLOCK
    longest = _MOST_TOKENS
    unready = "nothing: wait until the model is loaded; start a server that drains again; or read the server's log"

    def __init__(self, target: ProbedServer) -> None:
        self.target = target
        self.salt, self.other_salt = (f"foreword-explain-{uuid4().hex}" for _ in range(2))
        self.prompt: list[int] = []

    def results(self) -> Iterator[CheckResult]:
        raise NotImplementedError

    def ready(self) -> Iterator[CheckResult]:
        answer = self.target.call("GET", "/ready")
        if answer.status_code == 503:
            reason = body_of(answer).get("reason") or error_of(answer)
            raise CheckFailed("server", f"{self.target.url} is not ready: {reason}", self.unready)
        models = self.target.call("GET", "/v1/models")
        if models.status_code in (401, 403):
            raise CheckFailed(
                "server",
                f"{self.target.url} {'refuses the' if self.target.has_key else 'wants an'} API key",
                "`--api-key` of this command; `--api-keys` of the server; a proxy that drops `authorization`",
            )
        if not models.is_success:
            raise CheckFailed("server", f"{self.target.url}/v1/models: {error_of(models)}", _BETWEEN)
        cards = body_of(models).get("data") or []
        names = [card["id"] for card in cards]
        if self.target.model is None and names:
            self.target.model = names[0]
        if self.target.model not in names:
            raise CheckFailed(
                "server",
                f"{self.target.url} does not serve {self.target.model!r}; it serves {', '.join(names) or 'no model'}",
                "`--model` of this command",
            )
        mine = (card.get("max_model_len") for card in cards if card["id"] == self.target.model)
        self.longest = min(filter(None, mine), default=_MOST_TOKENS)
        yield CheckResult("server", f"{self.target.url} serves {self.target.model}")

    def new_prompt(self, length: int = 0) -> None:
        self.prompt = new_prompt(min(max(length, _BLOCKS * self.block + 1, _FEWEST_TOKENS), self.longest - 2))

    def computed(self) -> Iterator[CheckResult]:
        """A prompt that was never sent before is computed."""
        if self.longest < 2 * self.block:
            raise CheckFailed(
                "computed",
                f"prompts of up to {self.longest} tokens do not fill two blocks of {self.block}",
                "a smaller `--block-size`, or a larger `--max-model-len` or `--kv-memory`",
            )
        self.new_prompt()
        first = self.ask()
        if first.cached is not None and first.cached >= self.block:
            raise CheckFailed(
                "computed",
                f"{first.cached} tokens of a prompt that was never sent before count as cached",
                "what stands between here and the server: it changes or replays requests",
            )
        if first.tokens != len(self.prompt):
            raise CheckFailed(
                "computed",
                f"a prompt of {len(self.prompt)} tokens was computed as one of {first.tokens}",
                "what stands between here and the server: it changes requests",
            )
        self.first = first
        yield CheckResult("computed", f"a new prompt of {first.tokens} tokens")

    def ask(self, salt: str = "", *, report: bool = False) -> ProbeAnswer:
        """Send the prompt. Raises CheckFailed if it is refused."""
        answer = self.target.ask(self.prompt, salt or self.salt, report=report)
        if answer.error:
            behind = (self.target.json("/v1/router/state", admin=True) or {}).get("replicas", ())
            reasons = "".join(f"; {one['replica']}: {one['reason']}" for one in behind if one["reason"])
            raise CheckFailed(
                "answer",
                f"a prompt was refused ({answer.status}): {answer.error}{reasons}",
                _REFUSED.get(answer.status, _BETWEEN),
            )
        return answer

    def kept_apart(self) -> Iterator[CheckResult]:
        """A request with another salt finds nothing of it."""
        other = self.ask(self.other_salt)
        if (other.cached or 0) >= self.block:
            raise CheckFailed(
                "salt",
                f"a request with another cache_salt found {other.cached} tokens of it",
                "what stands between here and the server: it drops `cache_salt`",
            )
        yield CheckResult("salt", "a request with another cache_salt found nothing of it")

    def template(self) -> Iterator[CheckResult]:
        """The chat template writes the same tokens each time."""
        path = "/tokenize" if self.vllm_paths else "/v1/tokenize"
        body = {"model": self.target.model, "messages": [{"role": "user", "content": "Which way is north?"}]}
        texts: list[list[int]] = []
        for number in range(2):
            if number:
                time.sleep(1.1)  # a template that shows the time shows another one
            answer = self.target.call("POST", path, body)
            if "tokens" not in body_of(answer):
                self.untokenized(answer.status_code)
                return
            texts.append(answer.json()["tokens"])
        one, two = texts
        same = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        if one != two:
            raise CheckFailed(
                "template",
                f"the same chat has other tokens a second later, from token {same} of {len(one)} on",
                "the model's chat template: move what changes to the end, or remove it",
            )
        yield CheckResult("template", "a chat has the same tokens each time")

    vllm_paths = False

    def untokenized(self, status: int) -> None:
        """Nothing to say: the model has no chat template."""

    def remove_probes(self) -> None:
        """Remove the probes' blocks, if this caller may. Otherwise they are evicted in time."""
        if self.prompt:
            with contextlib.suppress(NoAnswer):
                self.target.call("DELETE", f"/v1/cache?cache_salt={self.salt}&cache_salt={self.other_salt}")


class ServerChecks(Checks):
    """A Foreword server, or a vLLM with Foreword's connector."""

    def __init__(self, target: ProbedServer, kind: Kind, *, reset: bool = False) -> None:
        super().__init__(target)
        self.vllm, self.vllm_paths, self._reset = kind == "vllm", kind == "vllm", reset
        self._names = {what: metric(kind, *counter) for what, counter in _COUNTERS.items()}

    def results(self) -> Iterator[CheckResult]:
        yield from self.ready()
        self.next_step()
        self.before = self.target.metrics()
        size = self.before.labels("vllm:cache_config_info").get("block_size", "")
        self.block = int(size) if size.isdigit() and int(size) else DEFAULT_BLOCK
        yield from self.computed()
        started = at_once([lambda: self.target.metrics().total("process_start_time_seconds")] * _AT_ONCE)
        if len(set(started)) > 1:
            yield self.several()
            return
        for step in (self.on_device, self.kept_apart, self.earlier, self.tiers, self.template):
            yield from step()

    def count(self, what: str, metrics: Scrape, **labels: str) -> float:
        """How much a counter has grown since the first probe."""
        name = self._names[what]
        return metrics.total(name, **labels) - self.before.total(name, **labels)

    def next_step(self) -> None:
        """vLLM publishes what its connector has counted with its next step."""
        if self.vllm:
            self.target.ask(new_prompt(2), self.other_salt)

    def found(self, answer: ProbeAnswer, before: Scrape, name: str) -> int:
        """Cached tokens of a prompt: by a counter if the answer does not say."""
        if answer.cached is not None:
            return answer.cached
        return int(self.target.metrics().total(name) - before.total(name))

    def several(self) -> CheckResult:
        """Several servers answer, so that no counter can be compared. Raises CheckFailed if they do not share KV."""
        time.sleep(_SHARED_SECONDS)
        answers = at_once([lambda: self.ask(report=True)] * _AT_ONCE)
        if missed := sum(one.cached is not None and one.cached < self.block for one in answers):
            raise CheckFailed(
                "placed",
                f"several servers answer at {self.target.url}: the same prompt again missed {missed} of {len(answers)} times",
                "`foreword route` in front of them, or a store that they share",
            )
        return CheckResult(
            "placed",
            "several servers answer here, and none says that it missed the prompt; the rest holds for one of them only",
            None,
            "the URL of one of them",
        )

    def on_device(self) -> Iterator[CheckResult]:
        """Check that a repeated prompt is found on the device."""
        metrics = self.target.metrics()
        again = self.ask(report=True)
        self.held = self.found(again, metrics, "vllm:prefix_cache_hits_total")
        if self.held >= self.block:
            said = again.cached is not None
            unsaid = "" if said else "; the server does not say it in its answers (`--enable-prompt-tokens-details`)"
            yield CheckResult("device", f"the same prompt again: {self.held} of {again.tokens} tokens found{unsaid}")
            return
        config = metrics.labels("vllm:cache_config_info")
        report = again.report or {}
        if config.get("enable_prefix_caching") == "False" or report.get("reason") == "disabled":
            raise CheckFailed("device", "prefix caching is switched off", "`--enable-prefix-caching`")
        blocks = config.get("num_gpu_blocks", "")
        if blocks.isdigit() and int(blocks) * self.block < 2 * len(self.prompt):
            raise CheckFailed(
                "device",
                f"the KV memory of {int(blocks) * self.block} tokens does not keep a prompt of {len(self.prompt)}",
                "`--kv-memory` (vLLM: `--gpu-memory-utilization`, `--kv-cache-memory-bytes`)",
            )
        reason = report.get("detail") or "the same prompt again found nothing"
        raise CheckFailed(
            "device",
            reason,
            "what stands in front of the server, if it changes prompts or salts; on a busy server a larger `--kv-memory`",
        )

    def earlier(self) -> Iterator[CheckResult]:
        """Blocks that could not be used before the probe, of other tenants than its own. Nothing to say if there were none."""
        name = self._names["errors"]
        for tier in self.before.by("tier", name):
            for kind, failed in self.before.by("kind", name, tier=tier).items():
                if failed and kind in _KEYS:
                    yield CheckResult(
                        "earlier", f"{tier}: {failed:.0f} blocks or calls failed before ({kind})", None, _KEYS[kind]
                    )

    def tiers(self) -> Iterator[CheckResult]:
        """Check that written blocks reach every tier, and are loaded from there."""
        if self.vllm and not any(name.startswith("vllm:foreword_") for name in self.before.families):
            raise CheckFailed(
                "stores",
                "vLLM runs without Foreword's connector, or it has not started",
                "`--kv-transfer-config` of vLLM, see docs/guides/vllm.md",
            )
        if not self.vllm and not self.before.tier_states():
            yield CheckResult("stores", "none: KV is kept until the device evicts it, or the server ends (`--store`)")
            return
        for step in (self.written, self.loaded):
            for result in step():
                yield result
                if result.ok is None:
                    return

    def written(self) -> Iterator[CheckResult]:
        began = time.monotonic()
        missing, metrics = self._written_within(_WRITE_SECONDS)
        while missing and self.count("refused", metrics, kind="short") and len(self.prompt) < self.most:
            # Prompts of this length are not kept on purpose; longer ones may be.
            self.new_prompt(4 * len(self.prompt))
            for _ in range(2):
                self.ask()
            self.before = metrics
            missing, metrics = self._written_within(_WRITE_SECONDS)
        states = metrics.tier_states()
        if self.vllm and not states:
            raise CheckFailed(
                "written",
                "nothing was written, and vLLM publishes no state of a tier",
                '`"store"` in kv_connector_extra_config; the log of the workers',
            )
        for tier, seen in states.items():
            for state, (text, setting) in _STATES.items():
                if state in seen:
                    kinds = "" if self.vllm else ", ".join(self._grown(metrics, tier))
                    raise CheckFailed("written", f"{tier} {text}{f' ({kinds})' if kinds else ''}", setting)
        if keyless := [tier for tier in states if "store_without_keys" in self._grown(metrics, tier)]:
            raise CheckFailed(
                "written",
                f"{', '.join(keyless)}: blocks cannot be encrypted, because the key store does not answer",
                "`--encryption-key-store`, or the server or disk behind it",
            )
        read_only = [tier for tier, seen in states.items() if "read_only" in seen]
        missing += [tier for tier in read_only if self.count("errors", metrics, tier=tier)]
        if read_only and len(read_only) == len(states) and not missing:
            yield CheckResult(
                "written",
                f"{', '.join(read_only)}: nothing may be written, what this server computes is kept on its device only",
                None,
                "`read_only=` in the store's URL, the rights of its folder, its key store, or a store beside `peer://`",
            )
            return
        if missing:
            raise self._unwritten(missing[0], metrics)
        holding = [tier for tier, seen in states.items() if "holding" in seen]
        places = ", ".join(tier for tier in states if tier not in (*read_only, *holding))
        restricted = f"; {', '.join(read_only)} is read only" if read_only else ""
        restricted += f"; {', '.join(holding)} gets blocks later (`hold=`)" if holding else ""
        yield CheckResult("written", f"to {places} within {time.monotonic() - began:.1f} s{restricted}")

    @property
    def most(self) -> int:
        """Tokens of the longest probe."""
        return min(_MOST_TOKENS, self.longest - 2)

    def _written_within(self, seconds: float) -> tuple[list[str], Scrape]:
        """Wait until the tiers have the probe's blocks, or say why not. Returns those that lack more than half of them."""
        deadline = min(time.monotonic() + seconds, self.target.deadline - _POLL_SECONDS)
        wanted = 1 if self.vllm else len(self.prompt) // self.block
        while True:
            self.next_step()
            metrics = self.target.metrics()
            writable = [tier for tier, seen in metrics.tier_states().items() if not seen & {"read_only", "holding"}]
            counts = {tier: self.count("written", metrics, tier=tier) for tier in writable}
            waiting = [tier for tier, count in counts.items() if count < wanted]
            said = all(self._reasons(tier, metrics) for tier in waiting)
            if (said and (writable or not self.vllm)) or time.monotonic() >= deadline:
                return [tier for tier in waiting if 2 * counts[tier] < wanted], metrics
            time.sleep(_POLL_SECONDS)

    def _reasons(self, tier: str, metrics: Scrape) -> bool:
        """Whether it is known already why the tier does not take blocks."""
        refused = any(self.count("refused", metrics, tier=tier, kind=kind) for kind in ("short", "rate"))
        return refused or self.count("errors", metrics, tier=tier) > 0 or self._is_small(tier, metrics)

    def _is_small(self, tier: str, metrics: Scrape) -> bool:
        """Whether the tier is too small for one prompt: it is full, and has fewer blocks than that."""
        budget = metrics.total("foreword:tier_budget_bytes", tier=tier)
        blocks, size = (metrics.total(f"foreword:tier_{one}", tier=tier) for one in ("blocks", "bytes"))
        wanted = len(self.prompt) // self.block
        return 0 < blocks < wanted and budget > 0 and size * (blocks + 1) > budget * blocks

    def _grown(self, metrics: Scrape, tier: str) -> list[str]:
        name = self._names["errors"]
        before = self.before.by("kind", name, tier=tier)
        return [kind for kind, count in metrics.by("kind", name, tier=tier).items() if count > before.get(kind, 0.0)]

    def _unwritten(self, tier: str, metrics: Scrape) -> CheckFailed:
        if self.count("errors", metrics, tier=tier):
            kinds = "" if self.vllm else f" ({', '.join(self._grown(metrics, tier))})"
            return CheckFailed("written", f"{tier}: calls fail{kinds}", _STATES["off"][1])
        if refused := [kind for kind in _RULES if self.count("refused", metrics, tier=tier, kind=kind)]:
            return CheckFailed("written", f"{tier} refuses the prompt's blocks ({refused[0]})", _RULES[refused[0]])
        if self._is_small(tier, metrics):
            return CheckFailed(
                "written",
                f"{tier} has no room for a prompt of {len(self.prompt)} tokens",
                "a larger `size=` in the store's URL",
            )
        if self.count("dropped", metrics):
            return CheckFailed(
                "written",
                f"{tier}: blocks are dropped, because the queue of writes is full",
                "a faster tier, or a larger `--store-staging`",
            )
        count = f"{self.count('written', metrics, tier=tier):.0f} of {len(self.prompt) // self.block} blocks were"
        return CheckFailed(
            "written",
            f"{'nothing was' if self.vllm else count} written to {tier} within {_WRITE_SECONDS:.0f} s",
            "`admit=`, `min_tokens=` or `write_rate=` in the store's URL; the store itself, see the log of vLLM's workers"
            if self.vllm
            else "a faster store, or a larger `tenant_quota=` in its URL; see the server's log",
        )

    def loaded(self) -> Iterator[CheckResult]:
        """Once it is gone from the device, it is loaded from a tier."""
        if untried := self._empty_device():
            yield CheckResult("loaded", f"not tried: {untried}", None)
            return
        before = self.target.metrics()
        answer = self.ask(report=True)
        loaded = (answer.report or {}).get("loaded_tokens") or {}
        cached = sum(loaded.values())
        if self.vllm:
            cached = self.found(answer, before, "vllm:external_prefix_cache_hits_total")
        if cached >= self.block:
            places = " and ".join(loaded) or "the stores"
            text = f"gone from the device, {cached} of {answer.tokens} tokens came from {places}"
            whole = 2 * cached > self.held
            partly = (
                "if it stays so: `write_rate=`, `tenant_quota=` or `size=` in the store's URL, or a faster tier first"
            )
            yield CheckResult("loaded", text, whole or None, "" if whole else partly)
            return
        after = self.target.metrics()
        name = self._names["lookups"]
        known = before.by("outcome", name)
        outcome = next((one for one, n in after.by("outcome", name).items() if n > known.get(one, 0.0)), "")
        grown = {one: after.total(self._names[one]) > before.total(self._names[one]) for one in ("cut", "stopped")}
        if grown["cut"] and not grown["stopped"]:
            if len(self.prompt) < self.most:  # so few tokens may be computed in less time than a store answers
                self.before = after
                self.new_prompt(self.most)
                self.ask()
                self._written_within(_WRITE_SECONDS)
                yield from self.loaded()
                return
            raise CheckFailed(
                "loaded",
                "gone from the device, found, and not loaded in time",
                "`--store-load-timeout` (vLLM: `load_timeout`), or a faster tier first",
            )
        if after.total(self._names["declined"]) > before.total(self._names["declined"]) or outcome == "found":
            yield CheckResult("loaded", "found, and computed: that is faster here than loading so few tokens", None)
            return
        text, setting = {
            "timed_out": ("the tiers did not answer in time", "`--store-lookup-timeout`, or a faster tier first"),
            "tier_off": ("a tier is off", _STATES["off"][1]),
            "not_allowed": ("the stores may not be read", "docs/operations/audit.md; what the model allows"),
        }.get(
            outcome,
            ("it is in no tier any more", "a larger `size=` or `ttl=` in the store's URL, or Redis's `maxmemory`"),
        )
        raise CheckFailed("loaded", f"gone from the device, nothing was loaded: {text}", setting)

    def _empty_device(self) -> str:
        """Take the probe from the device. Returns why that is not possible."""
        if not self.vllm:
            answer = self.target.call("DELETE", f"/v1/cache?scope=device&cache_salt={self.salt}")
            return "" if answer.is_success else f"the device may not be emptied ({answer.status_code})"
        if not self._reset:
            return "vLLM can only empty its cache for all requests (`--reset`, if nothing else runs)"
        answer = self.target.call("POST", "/reset_prefix_cache")
        return "" if answer.is_success else "vLLM resets its cache with VLLM_SERVER_DEV_MODE=1 only"


def until_failed(checks: Checks) -> Iterator[CheckResult]:
    """The results up to the first failed check. Removes the probes in the end."""
    try:
        for result in checks.results():
            yield result
            if result.ok is False:
                return
    except CheckFailed as failed:
        yield failed.result
    finally:
        checks.remove_probes()


class RouterChecks(Checks):
    """A router: the same replica serves a prompt again, and each replica keeps it."""

    unready = "`--replica`, and the replicas: are they up, and reachable from the router?"

    def results(self) -> Iterator[CheckResult]:
        yield from self.ready()
        state = self.target.json("/v1/router/state", admin=True) or {}
        self.replicas: list[dict[str, Any]] = [
            one for one in state.get("replicas", ()) if self.target.model in one.get("models", (self.target.model,))
        ]
        pools: list[dict[str, Any]] = state.get("models", [])
        pool = next((one for one in pools if one["model"] == self.target.model), {})
        self.policy, self.most_blocks = pool.get("policy", ""), pool.get("directory_budget_blocks", 0)
        self.block = max((one.get("block_size") or DEFAULT_BLOCK for one in self.replicas), default=DEFAULT_BLOCK)
        for step in (
            self.in_service,
            self.computed,
            self.found_again,
            self.kept_apart,
            self.tokens,
            self.events,
            self.behind,
        ):
            yield from step()

    def in_service(self) -> Iterator[CheckResult]:
        """All replicas take requests and have the same weights."""
        for one in self.replicas:
            if not one.get("takes_requests", True):
                raise CheckFailed(
                    "replicas", f"{one['replica']} takes no requests: {one.get('reason')}", _for_replica(one)
                )
        if not self.replicas:
            yield CheckResult(
                "replicas", "not looked at: the router shows them to its operator only (`--admin-key`)", None
            )
            return
        weights = {one["weights"] for one in self.replicas if one.get("weights") not in (None, "unknown")}
        if len(weights) > 1:
            raise CheckFailed(
                "replicas",
                f"the replicas of {self.target.model} have {len(weights)} different weights, and share nothing",
                "the weights that the replicas serve: docs/guides/router.md",
            )
        yield CheckResult("replicas", f"{len(self.replicas)} take requests")
        if len(sizes := sorted({size for one in self.replicas if (size := one.get("block_size"))})) > 1:
            yield CheckResult(
                "replicas",
                f"blocks of {' and '.join(map(str, sizes))} tokens: these replicas find nothing of each other in a store",
                None,
                "`--block-size` of the replicas: the same",
            )

    def found_again(self) -> Iterator[CheckResult]:
        """Check that a repeated prompt goes to the replica that has it, and is found."""
        answers = at_once([lambda: self.ask(report=True)] * 3)
        best = max(answers, key=lambda one: one.cached or 0)
        named = next((name for name in _BLIND if f": {name}," in best.route), self.policy)
        if named in _BLIND and len(self.replicas) != 1:
            raise CheckFailed(
                "placed", f"the policy {named} places prompts without a look at what replicas hold", "`--policy cost`"
            )
        if best.cached is None:
            raise CheckFailed(
                "placed",
                f"{best.replica or 'a replica'} does not say what was cached, so the router cannot learn it",
                "vLLM's `--enable-prompt-tokens-details`",
            )
        if not best.replica:
            yield CheckResult(
                "placed",
                f"{best.cached} of {best.tokens} tokens found; the answers do not name the replica",
                None,
                "what stands in front of the router: it drops `x-foreword-route`",
            )
            return
        if any((one.cached or 0) < self.block <= best.cached for one in answers if one.replica == self.first.replica):
            raise CheckFailed(
                "placed",
                f"{self.first.replica} found a prompt that it had computed, and found nothing of it at the same time",
                "`--replica`: several servers behind one address; name each, or use `--replica-dns`",
            )
        if best.cached < self.block:
            yield from self.behind(best.replica)
            raise CheckFailed(
                "placed",
                f"{best.replica} has it, and nothing was found through the router",
                "see `foreword explain` for that replica",
            )
        yield CheckResult(
            "placed", f"the same prompt again went to {best.replica}: {best.cached} of {best.tokens} tokens found"
        )

    def tokens(self) -> Iterator[CheckResult]:
        """The router sees the replica's tokens."""
        yield from self.template()
        answer = self.target.call(
            "POST",
            "/v1/completions",
            {"model": self.target.model, "prompt": _TEXT, "max_tokens": 1, "cache_salt": self.other_salt},
        )
        made = (body_of(answer).get("usage") or {}).get("prompt_tokens", 0)
        last = self.target.json("/v1/router/decisions?last=20", admin=True) or {}
        for one in last.get("data", ()):
            known = (
                made and one["request_id"] == answer.headers.get("x-request-id") and one["tokens_from"] == "tokenizer"
            )
            if known and (read := one["prompt_tokens"]) != made:
                raise CheckFailed(
                    "tokens",
                    f"the router's tokenizer makes {read} tokens of a text of {made}, so it finds no prefix again",
                    "`--tokenizer` of the router: the replicas', or none",
                )

    def untokenized(self, status: int) -> None:
        if status == 503:
            raise CheckFailed(
                "tokens", "no replica tokenizes, so the router compares prompts as text", "`--tokenizer` of the router"
            )

    def events(self) -> Iterator[CheckResult]:
        """Events arrive from the replicas that publish them. Nothing to say if they do."""
        yield from ()
        metrics = self.target.metrics()
        sources = Counter(where for one in self.replicas for where in set(one.get("kv_events", ())))
        for where in (where for where, count in sources.items() if count > 1):
            raise CheckFailed("events", f"several replicas share {where}", "`events=` of `--replica`: each its own")
        for one in self.replicas:
            got = metrics.total("foreword:router_kv_events_total", replica=one["replica"], kind="messages")
            if one.get("kv_events") and not got and one["replica"] == self.first.replica:
                text = f"no KV events arrive from {one['replica']}: {', '.join(one['kv_events'])}"
                raise CheckFailed(
                    "events", text, "`--kv-events` of the replica, `events=` of `--replica`; ports between them"
                )
        held = [(one.get("capacity_tokens") or 0) // self.block for one in self.replicas if one.get("kv_events")]
        if 0 < self.most_blocks < sum(held):
            text = f"the router remembers {self.most_blocks} blocks, and the replicas have {sum(held)} on their devices"
            if self.most_blocks < max(held):
                raise CheckFailed("events", text, "`--directory-blocks`")
            yield CheckResult("events", text, None, "`--directory-blocks`")

    def behind(self, only: str = "") -> Iterator[CheckResult]:
        """The checks of each replica that can be reached from here."""
        for url in (one["replica"] for one in self.replicas[:_REPLICAS] if only in ("", one["replica"])):
            target = self.target.other(url)
            try:
                kind = target.kind()
                if kind not in ("server", "vllm"):
                    continue
                for result in until_failed(ServerChecks(target, kind)):
                    if result.name == "server" and result.ok is False:
                        yield CheckResult(result.name, f"not looked at: {result.text}", None)
                        break
                    if result.ok is False or result.name in ("stores", "written", "loaded"):
                        yield CheckResult(result.name, f"{url}: {result.text}", result.ok, result.setting)
            except NoAnswer as error:
                yield CheckResult("server", f"not looked at: {error.message}", None)


def _for_replica(one: dict[str, Any]) -> str:
    if one.get("drained"):
        return "`POST /v1/router/undrain`"
    return "the replica: is it up, and reachable from the router? `--replica-key`, if it wants a key"


def checks_of(target: ProbedServer, kind: Kind, *, reset: bool = False) -> Checks:
    """The checks of a server or router."""
    return RouterChecks(target) if kind == "router" else ServerChecks(target, kind, reset=reset)
