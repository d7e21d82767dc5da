"""The usage ledger's file, and `foreword bill`."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import stat
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foreword.cli.main import app
from foreword.errors import ConfigError
from foreword.ledger import UsageLedger
from foreword.usage import TokenUsage

PRICES = """
source = "a list of this test"
currency = "EUR"

[models."*"]
input = 3.0
cache_read = 0.3
cache_write = 3.75
output = 15.0

[models.small]
input = 1
output = 2
"""


def write(path: Path, seed: int, requests: int) -> dict[tuple[str, str], Counter[str]]:
    """A ledger of drawn requests. Returns its sums by tenant and model."""
    draw, ledger = random.Random(seed), UsageLedger(path)
    sums: dict[tuple[str, str], Counter[str]] = {}
    for number in range(requests):
        tenant, model = draw.choice(("alice", "bob")), draw.choice(("small", "large"))
        prompt = draw.randrange(5000)
        usage = TokenUsage(prompt, draw.randrange(300), draw.randint(0, prompt), model=model)
        if draw.random() < 0.1:  # refused
            ledger.note(str(number), tenant, "POST /v1/completions", 400, 0.01, TokenUsage())
            continue
        ledger.note(str(number), tenant, "POST /v1/completions", draw.choice((200, 499)), 0.5, usage)
        one = sums.setdefault((tenant, model), Counter())
        one.update(requests=bool(usage.charged), prompt=prompt, cached=usage.cached, output=usage.output)
    ledger.close()
    assert not ledger.dropped
    return sums


@pytest.mark.parametrize("seed", range(3))
def test_sums_and_costs(tmp_path: Path, seed: int) -> None:
    """A bill has every token of every ledger once, at the price of its model, and what it would cost without a cache. The FOCUS
    file has the same sums. Lines that are no requests are counted and not billed."""
    ledgers = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    sums = write(ledgers[0], seed, 300)
    for key, more in write(ledgers[1], seed + 100, 50).items():
        sums.setdefault(key, Counter()).update(more)
    with ledgers[0].open("ab") as file:
        file.write(b'{"time": 1}\nno JSON\n')
    (tmp_path / "prices.toml").write_text(PRICES)
    focus = tmp_path / "focus.csv"
    command = ["bill", *map(str, ledgers), "--prices", str(tmp_path / "prices.toml"), "--json", "--focus", str(focus)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["currency"] == "EUR" and found["unreadable_lines"] == 2
    assert {(one["tenant"], one["model"]) for one in found["bills"]} == set(sums)
    million = Decimal(1_000_000)
    for one in found["bills"]:
        expected = sums[one["tenant"], one["model"]]
        uncached = expected["prompt"] - expected["cached"]
        assert [one[key] for key in ("requests", "cached", "uncached", "output")] == [
            expected["requests"], expected["cached"], uncached, expected["output"],
        ]  # fmt: skip
        read, wrote, out, plain = (1, 1, 2, 1) if one["model"] == "small" else map(Decimal, ("0.3", "3.75", "15", "3"))
        assert (
            Decimal(one["cost"]) == (read * expected["cached"] + wrote * uncached + out * expected["output"]) / million
        )
        assert Decimal(one["without_cache"]) == (plain * expected["prompt"] + out * expected["output"]) / million
    rows = list(csv.DictReader(focus.open()))
    assert sum(Decimal(row["BilledCost"]) for row in rows) == sum(Decimal(one["cost"]) for one in found["bills"])
    assert {row["ChargeCategory"] for row in rows} == {"Usage"} and {row["BillingCurrency"] for row in rows} == {"EUR"}
    for row in rows:
        assert Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"]) == Decimal(row["ListCost"])
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]


# Columns by FOCUS 1.2, by the rules of its own validator (focus_validator 2.0.1, model-1.2.json): what must be in
# every file and what must be there of prices, quantities and tenants; what is a decimal; and what must not be empty.
DECIMAL = {
    *("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "ContractedUnitPrice", "ListUnitPrice"),
    *("ConsumedQuantity", "PricingQuantity"),
}
TIMES = {"BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd"}
FILLED = DECIMAL | TIMES | {
    *("BillingAccountId", "BillingAccountName", "BillingCurrency", "ChargeCategory", "ChargeDescription"),
    *("ConsumedUnit", "InvoiceIssuerName", "PricingCategory", "PricingUnit", "ProviderName", "PublisherName"),
    *("ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceId", "ResourceId"),
    *("ResourceName", "ResourceType", "SubAccountId", "SubAccountName", "ChargeFrequency"),
}  # fmt: skip
NULL = {"ChargeClass", "InvoiceId"}  # not a correction, on no invoice
JSON = {"SkuPriceDetails", "Tags"}


def test_focus_rows_are_valid(tmp_path: Path) -> None:
    """The FOCUS file has every column that the specification asks of it, and no other; each cell is of its column's type. Its
    numbers are decimals also where all are whole, so that readers that guess types do not take a column for integers."""
    (tmp_path / "usage.jsonl").write_text(line(usage={"prompt": 3_000_000, "output": 1_000_000, "model": "small"}))
    bill(tmp_path, "--focus", str(tmp_path / "bill.csv"))
    rows = list(csv.DictReader((tmp_path / "bill.csv").open()))
    assert [row["BilledCost"] for row in rows] == ["3.0", "2.0"]
    for row in rows:
        assert row.keys() == FILLED | NULL | JSON
        assert all(re.fullmatch(r"\d+\.\d+", row[name]) for name in DECIMAL)
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row[name]) for name in TIMES)
        assert all(row[name] for name in FILLED) and not any(row[name] for name in NULL)
        assert all(isinstance(json.loads(row[name]), dict) for name in JSON)
        assert all(key.startswith("x_") for key in json.loads(row["SkuPriceDetails"]))  # no key of the specification
        assert (row["ServiceCategory"], row["ServiceSubcategory"]) == ("AI and Machine Learning", "Generative AI")


NO_PRICES = (
    "",
    "[[",
    "models = 3",
    "[models.a]\ninput = 1",
    "[models.a]\ninput = -1\noutput = 1",
    "[models.a]\ninput = true\noutput = 1",
    "[models.a]\ninput = nan\noutput = 1",
    "[models.a]\ninput = 1\noutput = inf",
    "[models.a]\ninput = 1\noutput = 1\nfree = 1",
    "rate = 2\n[models.a]\ninput = 1\noutput = 1",
)


@pytest.mark.parametrize("prices", NO_PRICES)
def test_prices_that_are_none(tmp_path: Path, prices: str) -> None:
    """A price file with a key too many, too few, or a price that is none is refused, in words."""
    (tmp_path / "prices.toml").write_text(prices)
    (tmp_path / "usage.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"prices\.toml"):
        CliRunner().invoke(
            app,
            ["bill", str(tmp_path / "usage.jsonl"), "--prices", str(tmp_path / "prices.toml")],
            catch_exceptions=False,
        )


def test_a_ledger_that_is_moved_away(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Lines after the file was moved, as log rotation does, are in a new file; no line is lost. Each file is for its user and
    group alone, whatever the process gives other files."""
    path, moved = tmp_path / "usage.jsonl", tmp_path / "usage.1"
    usual = os.umask(0)
    request.addfinalizer(lambda: os.umask(usual))
    ledger = UsageLedger(path)
    ledger.note("first", "", "r", 200, 0.1, TokenUsage(1))
    while not path.read_bytes():
        pass
    path.rename(moved)
    ledger.note("second", "", "r", 200, 0.1, TokenUsage(1))
    ledger.close()
    ids = [[json.loads(line)["id"] for line in one.read_text().splitlines()] for one in (moved, path)]
    assert ids == [["first"], ["second"]]
    assert [stat.S_IMODE(one.stat().st_mode) for one in (moved, path)] == [0o640, 0o640]


def test_a_ledger_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk requests go on; lines are counted as lost, and one error says so."""
    ledger = UsageLedger(Path("/dev/full"))
    for number in range(100):
        ledger.note(str(number), "", "r", 200, 0.1, TokenUsage(1))
    ledger.close()
    assert ledger.dropped == 100
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


def line(**changed: object) -> str:
    """A line of a ledger."""
    one = {"time": 1.79e9, "seconds": 1, "id": "a", "tenant": "t", "route": "r", "status": 200}
    return json.dumps({**one, "usage": {"prompt": 10, "output": 4, "cached": 2, "model": "m"}, **changed})


def bill(folder: Path, *more: str) -> dict[str, Any]:
    (folder / "prices.toml").write_text(PRICES)
    told = CliRunner().invoke(
        app,
        ["bill", str(folder / "usage.jsonl"), "--prices", str(folder / "prices.toml"), "--json", *more],
        catch_exceptions=False,
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_a_damaged_ledger(tmp_path: Path) -> None:
    """A line that no front writes is counted and not billed: numbers below zero or that no machine computes, times that no
    calendar has, halves of lines. A line behind the zeros that a crash of the machine leaves is billed."""
    bad = [line(usage={"prompt": -500}), line(usage={"output": -1, "prompt": 9})]
    bad += [line(usage={"prompt": 10**30}), line(usage={"prompt": 9, "cached": 2**62})]
    bad += [line(time=253402300000), line(time=-1), line(time=1e300), line()[:50], "null", "[" * 99_999, "\udcff"]
    text = "\n".join([line(), "\0" * 100 + line(), *bad, "", line()])
    (tmp_path / "usage.jsonl").write_text(text, errors="surrogateescape")
    found = bill(tmp_path, "--focus", str(tmp_path / "bill.csv"))
    [one] = found["bills"]
    assert (one["requests"], one["uncached"], one["cached"], one["output"]) == (3, 24, 6, 12)
    assert found["unreadable_lines"] == len(bad)


def test_a_ledger_that_ends_within_a_line(tmp_path: Path) -> None:
    """A process that continues the ledger of another, which ended within a line, loses no line of its own."""
    path = tmp_path / "usage.jsonl"
    for before in ("", line()[:70], line() + "\n"):
        path.write_text(before)
        ledger = UsageLedger(path)
        ledger.note("second", "t", "r", 200, 0.1, TokenUsage(1, model="m"))
        ledger.close()
        assert path.read_text().endswith("\n") and "\n\n" not in path.read_text()
        assert sum(one["requests"] for one in bill(tmp_path)["bills"]) == 1 + before.endswith("\n")


def test_long_names_stand_apart(tmp_path: Path) -> None:
    """Columns are as wide as their names: digests of tenants, and models of the hub, run into no other column."""
    names = ("67026fb5c7a6f2431dee06d950ea0c46", "meta-llama/Llama-3.1-8B-Instruct-FP8")
    (tmp_path / "usage.jsonl").write_text(line(tenant=names[0], usage={"prompt": 3, "model": names[1]}))
    (tmp_path / "prices.toml").write_text(PRICES)
    given = ["bill", str(tmp_path / "usage.jsonl"), "--prices", str(tmp_path / "prices.toml")]
    assert [*names, "1", "0", "3"] in [row.split()[:5] for row in CliRunner().invoke(app, given).output.splitlines()]


def test_a_ledger_is_billed_once(tmp_path: Path) -> None:
    """A ledger under two names, as two patterns of a shell give it, is refused."""
    (tmp_path / "usage.jsonl").write_text(line())
    (tmp_path / "link.jsonl").symlink_to("usage.jsonl")
    with pytest.raises(ConfigError, match="named twice"):
        bill(tmp_path, str(tmp_path / "link.jsonl"))


def test_a_bill_overwrites_no_ledger(tmp_path: Path) -> None:
    """`--focus` with the name of a file that is read is refused, and the file stays."""
    (tmp_path / "usage.jsonl").write_text(line())
    with pytest.raises(ConfigError, match="is a file that is read"):
        bill(tmp_path, "--focus", str(tmp_path / "." / "usage.jsonl"))
    assert (tmp_path / "usage.jsonl").read_text() == line()
