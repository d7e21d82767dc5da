"""`foreword bill`: what the requests of a usage ledger cost."""

from __future__ import annotations

import csv
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from foreword.cli.commands import described
from foreword.cli.server_client import plural
from foreword.config import read_text
from foreword.decoders import decode_json
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.ledger import RequestUsage

# A kind of tokens, the key of its price, and what it is called in a bill.
_KINDS: Final = {
    "cached": ("cache_read", "prompt tokens read from the cache"),
    "uncached": ("cache_write", "prompt tokens computed"),
    "output": ("output", "output tokens"),
}
_PER_TOKENS: Final = 1_000_000
_KEYS: Final = frozenset(("input", "cache_read", "cache_write", "output"))

Ledgers = Annotated[
    list[Path],
    typer.Argument(metavar="LEDGER...", help="Files of --usage-ledger, of routers or of servers, not of both."),
]
PriceFile = Annotated[Path, typer.Option("--prices", help="TOML file with prices per million tokens, by model.")]
FocusFile = Annotated[
    Path | None,
    typer.Option("--focus", help="Also write the charges as a FOCUS file (CSV), a row per day, tenant and model."),
]


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens, by model; `*` stands for all others. Without a price of their own, tokens that are read from
    or written to the cache cost what `input` does."""

    currency: str
    models: dict[str, dict[str, Decimal]]

    @classmethod
    def read(cls, path: Path) -> Prices:
        """From a file. Raises ConfigError."""
        try:
            given = tomllib.loads(read_text(path, "the prices"), parse_float=Decimal)
        except ValueError as error:
            raise ConfigError(f"{path} is no TOML file: {error}") from error
        models = given.pop("models", None)
        currency = given.pop("currency", "USD")
        unknown = given.keys() - {"source", "date"}
        if unknown or not isinstance(models, dict) or not models or not isinstance(currency, str):
            about = f"unknown key {min(unknown)!r}" if unknown else "there are no [models]"
            raise ConfigError(f'{path}: {about}; write currency, source, date, and [models.NAME] or [models."*"]')
        return cls(currency, {name: _prices(path, name, one) for name, one in models.items()})

    def of(self, model: str) -> dict[str, Decimal]:
        """Raises ConfigError if the model has no price."""
        found = self.models.get(model, self.models.get("*"))
        if found is None:
            raise ConfigError(f'there is no price of the model {model!r}; add [models.{model!r}] or [models."*"]')
        return found

    def cost(self, model: str, kind: str, tokens: int, *, cache: bool = True) -> Decimal:
        """The cost of tokens of a kind; without a cache, all prompt tokens are input."""
        return self.of(model)[_KINDS[kind][0] if cache or kind == "output" else "input"] * tokens / _PER_TOKENS


def _prices(path: Path, name: str, given: Any) -> dict[str, Decimal]:
    numbers = given if isinstance(given, dict) else {}
    bad = next((key for key, one in numbers.items() if key not in _KEYS or not _is_price(one)), None)
    if bad is not None or not {"input", "output"} <= numbers.keys():
        raise ConfigError(
            f"{path}: [models.{name}] needs input and output, may have cache_read and cache_write, each a number of 0 or more"
        )
    found = {key: Decimal(one) for key, one in numbers.items()}
    return {"cache_read": found["input"], "cache_write": found["input"], **found}


def _is_price(given: Any) -> bool:
    return (
        isinstance(given, int | Decimal)
        and not isinstance(given, bool)
        and given == given
        and 0 <= given < 1_000_000_000
    )


# Tokens of each kind, and `requests`, by day, tenant and model.
Charges = dict[tuple[str, str, str], Counter[str]]


def read_ledgers(paths: Iterable[Path]) -> tuple[Charges, int]:
    """The charges, and how many lines could not be read. Raises ConfigError."""

    from foreword.ledger import RequestUsage

    charges: Charges = {}
    bad = 0
    for line in _lines(paths):
        try:
            one = decode_json(line, RequestUsage)
            day = datetime.fromtimestamp(one.time, UTC).date().isoformat()
        except (ValueError, OverflowError, OSError):
            bad += 1
            continue
        if one.usage.charged:
            charges.setdefault((day, one.tenant, one.usage.model), Counter()).update(_tokens(one))
    return charges, bad


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    """Without the zeros that a file system may write where a machine has crashed."""
    for path in paths:
        try:
            with path.open("rb") as file:
                yield from filter(None, (line.strip(b"\0 \r\n") for line in file))
        except OSError as error:
            raise ConfigError(f"cannot read the ledger {path}: {error.strerror}") from error


def _tokens(one: RequestUsage) -> dict[str, int]:
    cached = min(one.usage.cached, one.usage.prompt)
    return {"requests": 1, "cached": cached, "uncached": one.usage.prompt - cached, "output": one.usage.output}


def bills(charges: Charges, prices: Prices) -> list[dict[str, Any]]:
    """A bill for each tenant and model: tokens, cost, and cost without a cache. Raises ConfigError for a model that has no
    price."""
    summed: dict[tuple[str, str], Counter[str]] = {}
    for (_, tenant, model), tokens in charges.items():
        summed.setdefault((tenant, model), Counter()).update(tokens)
    return [
        {
            "tenant": tenant,
            "model": model,
            **{key: tokens[key] for key in ("requests", *_KINDS)},
            "cost": sum(prices.cost(model, kind, tokens[kind]) for kind in _KINDS),
            "without_cache": sum(prices.cost(model, kind, tokens[kind], cache=False) for kind in _KINDS),
        }
        for (tenant, model), tokens in sorted(summed.items())
    ]


def focus_rows(charges: Charges, prices: Prices) -> Iterator[dict[str, Any]]:
    """Charges in the columns of the FinOps Open Cost and Usage Specification (FOCUS 1.2), a row per kind of tokens."""
    for (day, tenant, model), tokens in sorted(charges.items()):
        begin = datetime.fromisoformat(day).replace(tzinfo=UTC)
        month = begin.replace(day=1)
        period = begin, begin + timedelta(days=1), month, (month + timedelta(days=32)).replace(day=1)
        start, end, billed, until = (one.strftime("%Y-%m-%dT%H:%M:%SZ") for one in period)
        for kind, (key, text) in _KINDS.items():
            price, cost = prices.of(model)[key], prices.cost(model, kind, tokens[kind])
            if tokens[kind]:
                yield {
                    **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
                    **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), price / _PER_TOKENS),
                    **dict.fromkeys(("ConsumedQuantity", "PricingQuantity"), Decimal(tokens[kind])),
                    **dict.fromkeys(("ConsumedUnit", "PricingUnit"), "Tokens"),
                    **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName", "ServiceName"), "Foreword"),
                    "BillingAccountId": "foreword", "BillingAccountName": "Foreword", "BillingCurrency": prices.currency,
                    "BillingPeriodStart": billed, "BillingPeriodEnd": until, "ChargeCategory": "Usage", "ChargeClass": "",
                    "ChargeDescription": f"{model}: {text}", "ChargeFrequency": "Usage-Based", "ChargePeriodStart": start,
                    "ChargePeriodEnd": end, "InvoiceId": "", "PricingCategory": "Standard", "ResourceId": model,
                    "ResourceName": model, "ResourceType": "Model", "ServiceCategory": "AI and Machine Learning",
                    "ServiceSubcategory": "Generative AI", "SkuId": f"{model}/{kind}", "SkuMeter": text,
                    "SkuPriceDetails": f'{{"x_Tokens": "{kind}"}}', "SkuPriceId": f"{model}/{kind}",
                    "SubAccountId": tenant, "SubAccountName": tenant, "Tags": "{}",
                }  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bill", **described("bill usage.jsonl --prices prices.toml --focus bill.csv"))(bill)


def bill(
    ledgers: Ledgers,
    *,
    prices: PriceFile,
    focus: FocusFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Make bills: what tenants have used, what it costs at a price list, and what it would cost without a cache."""
    if len({one.resolve() for one in ledgers}) < len(ledgers):
        raise ConfigError("a ledger is named twice: its requests would be billed twice")
    listed = Prices.read(prices)
    charges, bad = read_ledgers(ledgers)
    found = bills(charges, listed)
    if focus is not None:
        if any(focus.resolve() == one.resolve() for one in (*ledgers, prices)):
            raise ConfigError(f"--focus {focus} is a file that is read")
        rows = list(focus_rows(charges, listed))
        try:
            with focus.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, sorted(rows[0]) if rows else [])
                writer.writeheader()
                # Readers of CSV take a number without a point for an integer, which FOCUS allows in none of its columns.
                writer.writerows(
                    {
                        name: f"{one + Decimal('0.0'):f}" if isinstance(one, Decimal) else one
                        for name, one in row.items()
                    }
                    for row in rows
                )
        except OSError as error:
            raise ConfigError(f"cannot write {focus}: {error.strerror}") from error
    if as_json:
        print(json.dumps({"currency": listed.currency, "bills": found, "unreadable_lines": bad}, indent=2, default=str))
        return
    total = {"tenant": "all", "model": ""} | {
        key: sum(one[key] for one in found) for key in ("requests", *_KINDS, "cost", "without_cache")
    }
    tenants, models = (
        max([least, *(2 + len(one[key]) for one in found)]) for key, least in (("tenant", 20), ("model", 28))
    )
    print(
        f"{'tenant':<{tenants}}{'model':<{models}}"
        f"{'requests':>9}{'cached':>14}{'computed':>14}{'output':>12}{'cost':>14}{'no cache':>14}"
    )
    for one in [*found, *([total] if len(found) > 1 else [])]:
        numbers = f"{one['requests']:>9,}{one['cached']:>14,}{one['uncached']:>14,}{one['output']:>12,}"
        print(
            f"{one['tenant']:<{tenants}}{one['model']:<{models}}{numbers}{one['cost']:>14.4f}{one['without_cache']:>14.4f}"
        )
    print(f"\n{listed.currency}; cached and computed are prompt tokens.")
    if bad:
        print(f"{plural(bad, 'line')} could not be read.")
