"""Rate limits and quotas per tenant: requests per minute, tokens per minute, requests at a time.

Pure: times are given. Requests are limited before they run. Tokens are charged when their number is known, and a tenant that
has overdrawn waits until its bucket has filled again; so one long request is never refused for its length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from foreword.errors import ConfigError
from foreword.request_errors import RateLimited

# Idle tenants are forgotten beyond this number. Their buckets are as good as full.
_MAX_TENANTS: Final = 10_000
_MINUTE: Final = 60.0
EVERYONE: Final = "*"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None is no limit.

    Attributes:
        requests: per minute.
        tokens: prompt and output tokens per minute.
        concurrent: requests at a time.
    """

    requests: float | None = None
    tokens: float | None = None
    concurrent: int | None = None


class Bucket:
    """A token bucket that holds one minute's worth. It may be overdrawn. `level_then` is its level `at` a time."""

    __slots__ = ("_size", "at", "level_then")

    def __init__(self, size: float, now: float) -> None:
        self._size, self.level_then, self.at = size, size, now

    def level(self, now: float) -> float:
        """The tokens in the bucket now."""
        self.level_then = min(self._size, self.level_then + max(now - self.at, 0.0) * self._size / _MINUTE)
        self.at = max(self.at, now)
        return self.level_then

    def take(self, amount: float, now: float) -> None:
        """Take out `amount`, whether or not it is there."""
        self.level_then = self.level(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds `amount`."""
        return max(amount - self.level(now), 0.0) * _MINUTE / self._size


@dataclass(slots=True)
class Account:
    """The state of one tenant."""

    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0


@dataclass(slots=True)
class Admitted:
    """An admitted request. At the end of its block it is finished.

    Attributes:
        charged: its tokens so far; None before the first charge.
    """

    quotas: Quotas
    tenant: str
    charged: int | None = None

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, *error: object) -> None:
        self.quotas.finish(self)


class Quotas:
    """The quotas of all tenants.

    Args:
        quotas: by tenant; the tenant `*` stands for all that are not listed. Without it they have no limits.

    Attributes:
        limited: whether any tenant has limits.
    """

    def __init__(self, quotas: Mapping[str, Quota] | None = None) -> None:
        self._quotas = dict(quotas or {})
        self._default = self._quotas.get(EVERYONE)
        self.limited = bool(self._quotas)
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Quotas:
        """From entries such as `alice requests=60 tokens=100000 concurrent=8`. Raises ConfigError."""
        quotas: dict[str, Quota] = {}
        for tenant, quota in map(_parse, entries):
            if tenant in quotas:
                raise ConfigError(f"there are two quotas of {tenant!r}; write its limits into one")
            quotas[tenant] = quota
        return cls(quotas)

    def admit(self, tenant: str, now: float, *, continued: bool = False) -> Admitted:
        """Count a request that begins; one that is `continued` was counted elsewhere and only runs here. Raises RateLimited,
        which says when a retry makes sense."""
        quota = self._quotas.get(tenant, self._default)
        if quota is None:
            return Admitted(self, tenant)
        account = self._account(tenant, quota, now)
        if continued:
            account.running += 1
            return Admitted(self, tenant)
        if quota.concurrent is not None and account.running >= quota.concurrent:
            raise RateLimited(f"{account.running} requests run already and at most {quota.concurrent} may", 1.0)
        _check(account.requests, 1.0, quota.requests, "requests", now)
        # A bucket of one token per minute could otherwise never be used.
        _check(account.tokens, min(1.0, quota.tokens or 1.0), quota.tokens, "tokens", now)
        if account.requests is not None:
            account.requests.take(1.0, now)
        account.running += 1
        return Admitted(self, tenant)

    def charge(self, admitted: Admitted, tokens: int, now: float) -> None:
        """Charge a request for all of its tokens so far. Earlier charges of this request are counted in."""
        account = self._accounts.get(admitted.tenant)
        if account is not None and account.tokens is not None:
            account.tokens.take(tokens - (admitted.charged or 0), now)
        admitted.charged = tokens

    def finish(self, admitted: Admitted) -> None:
        """The request has ended."""
        account = self._accounts.get(admitted.tenant)
        if account is not None:
            account.running -= 1

    def _account(self, tenant: str, quota: Quota, now: float) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            self._forget_idle()
            account = self._accounts[tenant] = Account(_bucket(quota.requests, now), _bucket(quota.tokens, now))
        self._accounts.move_to_end(tenant)
        return account

    def _forget_idle(self) -> None:
        if len(self._accounts) < _MAX_TENANTS:
            return
        idle = next((name for name, account in self._accounts.items() if account.running == 0), None)
        if idle is not None:
            del self._accounts[idle]


def _bucket(size: float | None, now: float) -> Bucket | None:
    return None if size is None else Bucket(size, now)


def _check(bucket: Bucket | None, needed: float, limit: float | None, what: str, now: float) -> None:
    if bucket is not None and bucket.level(now) < needed:
        raise RateLimited(f"the limit of {limit:g} {what} per minute is reached", bucket.seconds_until(needed, now))


def _parse(entry: str) -> tuple[str, Quota]:
    tenant, *limits = entry.split()
    values: dict[str, float] = {}
    for limit in limits or [""]:
        name, _, number = limit.partition("=")
        is_number = number.isascii() and number.replace(".", "", 1).isdigit()
        if name not in ("requests", "tokens", "concurrent") or not is_number or float(number) <= 0:
            raise ConfigError(
                f"quota {entry!r}: write TENANT and any of requests=N, tokens=N (per minute) and concurrent=N, "
                "separated by spaces; TENANT is * for all others"
            )
        values[name] = float(number)
    concurrent = values.pop("concurrent", None)
    return tenant, Quota(**values, concurrent=None if concurrent is None else max(int(concurrent), 1))
