"""Rate limits and quotas per tenant: requests per minute, tokens per minute, requests at a time.

Pure: times are given. Requests are limited before they run. Tokens are charged when their number is known, and a tenant that
has overdrawn waits until its bucket has filled again; so one long request is never refused for its length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from foreword.errors import ConfigError, RateLimited

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
    """A token bucket that holds one minute's worth. It may be overdrawn. `state`: its level and its time; full without."""

    __slots__ = ("_at", "_level", "_size")

    def __init__(self, size: float, now: float, state: tuple[float, float] | None = None) -> None:
        self._size = size
        self._level, self._at = state or (size, now)

    @property
    def state(self) -> tuple[float, float]:
        """The level, and the time of which it is."""
        return self._level, self._at

    def level(self, now: float) -> float:
        """The tokens in the bucket now."""
        self._level = min(self._size, self._level + max(now - self._at, 0.0) * self._size / _MINUTE)
        self._at = max(self._at, now)
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take out `amount`, whether or not it is there."""
        self._level = self.level(now) - amount

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
        at: when it was.
        charged: its tokens so far; None before the first charge.
    """

    quotas: Quotas
    tenant: str
    at: float
    charged: int | None = None

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, *error: object) -> None:
        self.quotas.finish(self)


class Accounts:
    """The accounts of all tenants with quotas, in this process."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    @contextmanager
    def open(self, tenant: str, quota: Quota, now: float) -> Iterator[Account]:
        """A tenant's account, to be read and changed in the block; a new one if there is none."""
        account = self._accounts.get(tenant)
        if account is None:
            self._forget_idle()
            account = self._accounts[tenant] = new_account(quota, now)
        self._accounts.move_to_end(tenant)
        yield account

    def _forget_idle(self) -> None:
        if len(self._accounts) < _MAX_TENANTS:
            return
        idle = next((name for name, account in self._accounts.items() if account.running == 0), None)
        if idle is not None:
            del self._accounts[idle]


class Quotas:
    """The quotas of all tenants.

    Args:
        quotas: by tenant; the tenant `*` stands for all that are not listed. Without it they have no limits.
        accounts: kept in this process by default.

    Attributes:
        limited: whether any tenant has limits.
    """

    def __init__(self, quotas: Mapping[str, Quota] | None = None, accounts: Accounts | None = None) -> None:
        self._quotas = dict(quotas or {})
        self._default = self._quotas.get(EVERYONE)
        self.limited = bool(self._quotas)
        self._accounts = Accounts() if accounts is None else accounts

    @classmethod
    def parse(cls, entries: Iterable[str], accounts: Accounts | None = None) -> Quotas:
        """From entries such as `alice requests=60 tokens=100000 concurrent=8`. Raises ConfigError."""
        quotas: dict[str, Quota] = {}
        for tenant, quota in map(_parse, entries):
            if tenant in quotas:
                raise ConfigError(f"there are two quotas of {tenant!r}; write its limits into one")
            quotas[tenant] = quota
        return cls(quotas, accounts)

    def admit(self, tenant: str, now: float, *, continued: bool = False) -> Admitted:
        """Count a request that begins; one that is `continued` was counted elsewhere and only runs here. Raises RateLimited,
        which says when a retry makes sense."""
        quota = self._quotas.get(tenant, self._default)
        if quota is None:
            return Admitted(self, tenant, now)
        with self._accounts.open(tenant, quota, now) as account:
            if not continued:
                _take(account, quota, now)
            account.running += 1
        return Admitted(self, tenant, now)

    def charge(self, admitted: Admitted, tokens: int, now: float) -> None:
        """Charge a request for all of its tokens so far. Earlier charges of this request are counted in."""
        quota = self._quotas.get(admitted.tenant, self._default)
        if quota is not None and quota.tokens is not None:
            with self._accounts.open(admitted.tenant, quota, now) as account:
                if account.tokens is not None:
                    account.tokens.take(tokens - (admitted.charged or 0), now)
        admitted.charged = tokens

    def finish(self, admitted: Admitted) -> None:
        """The request has ended."""
        quota = self._quotas.get(admitted.tenant, self._default)
        if quota is not None:
            with self._accounts.open(admitted.tenant, quota, admitted.at) as account:
                account.running -= 1


def new_account(quota: Quota, now: float) -> Account:
    """An account of which nothing was taken."""
    return Account(_bucket(quota.requests, now), _bucket(quota.tokens, now))


def _take(account: Account, quota: Quota, now: float) -> None:
    """Count a request that begins. Raises RateLimited."""
    if quota.concurrent is not None and account.running >= quota.concurrent:
        raise RateLimited(f"{account.running} requests run already and at most {quota.concurrent} may", 1.0)
    _check(account.requests, 1.0, quota.requests, "requests", now)
    # A bucket of one token per minute could otherwise never be used.
    _check(account.tokens, min(1.0, quota.tokens or 1.0), quota.tokens, "tokens", now)
    if account.requests is not None:
        account.requests.take(1.0, now)


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
