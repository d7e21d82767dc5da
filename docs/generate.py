"""Write the pages that are made from something else: docs/reference/cli.md from the commands, docs/reference/configuration.md
from the configuration's dataclasses, docs/reference/python.md from the public classes, docs/benchmarks.md and
dev/benchmarks.md from the files of docs/figures and dev/figures, in dev/paths.md what each file of its list does, in
docs/reference/http.md the table of all routes, in docs/reference/metrics.md those of metrics, in README.md that of
the engines, from docs/engines.json, the picture of the products, from packages/products.toml, and README's chart, from
docs/figures/10-vllm.json.

python docs/generate.py            write the pages
python docs/generate.py --check    status 1 if a page is not up to date

A file of figures is what a benchmark writes with `--json` (`write_figures` in benchmarks/harness.py): a table whose rows
have a processor, a date and a command, and what a run said beside it (`run`). The page shows the files in the order of their
names.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import tomllib
import typing
import xml.sax.saxutils
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main
from prometheus_client.metrics import MetricWrapperBase

from foreword.api.routes import Route
from foreword.cli.flags import SECTIONS, config_flags
from foreword.cli.main import app
from foreword.configuration import Config
from foreword.integrations.vllm.connector_counts import OWN as CONNECTOR_METRICS
from foreword.observability.front_registry import FrontRegistry
from foreword.offload.counters import LookupCounts, OffloadStatus
from foreword.router.app import routes_of as router_routes
from foreword.router.router import Router
from foreword.router.state_metrics import RouterStateCollector
from foreword.server.admission import Admission
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver
from foreword.store.series import series_of
from foreword.store.tier_counters import TierCounters

REFERENCE = Path(__file__).parent / "reference"
PATHS = Path(__file__).parents[1] / "dev" / "paths.md"
PACKAGE = Path(__file__).parents[1] / "foreword"
HTTP = REFERENCE / "http.md"
METRICS = REFERENCE / "metrics.md"
COUNTED = {"tiers": (TierCounters,), "the offload": (LookupCounts, OffloadStatus)}
# Tables of metrics by product, and the names that each takes; the last one takes the rest.
METRIC_TABLES = {
    "server": {
        "transfer": r"foreword:(transfer|served)_",
        "audit": r"foreword:(audit|quarantined)_",
        "stores": r"foreword:(tier|store)_",
        "cache": r".*(cache|blocks|prefix_|model_info)(?!.*_seconds)",
        "requests": r"",
    },
    "router": {"requests": r""},
}
ROUTES = "<!-- Written by docs/generate.py from the route tables"
FIGURES = Path(__file__).parent / "figures"
BUILDERS_FIGURES = Path(__file__).parents[1] / "dev" / "figures"
README = Path(__file__).parents[1] / "README.md"
ENGINES = Path(__file__).parent / "engines.json"
ENGINES_MARK = "<!-- Written by docs/generate.py from docs/engines.json"
PRODUCTS = Path(__file__).parents[1] / "packages" / "products.toml"
NOTE = "<!-- Written by docs/generate.py: change the texts in foreword/, then run it again. -->"
WIDTH = 100
# Colours of the bars in README's chart, by the first word of their name.
_BAR_COLORS = {"vLLM": "#9aa3ad", "LMCache": "#5b8fd6", "Foreword": "#1f6f43"}

CLI_INTRODUCTION = """
Every command describes its common options with `--help`, and all with `--help-all`.
`foreword --version` prints the version; `foreword --install-completion` installs completion for the
current shell.

The exit status is 0, 2 for an error of the caller (a wrong option, a wrong value, an unknown name),
and 1 for any other error. Error messages go to standard error.
"""

CONFIGURATION_INTRODUCTION = """
A server and a router take their configuration from three places. If two places set the same key,
the later one in this list has precedence:

1. a TOML file, `--config FILE`, with one table per section: `[engine]`, `[server]` and so on
2. environment variables, `FOREWORD_SECTION_KEY`; lists are separated by commas
3. command-line flags; a flag for a list may be repeated

```toml
[engine]
model = "Qwen/Qwen3-0.6B"
kv_memory = "4GiB"

[store]
urls = ["memory://?size=8GiB", "disk:///var/cache/foreword?size=200GiB"]
```

An unknown table or key is an error with a suggestion. So is a variable whose name is close to that
of a key, and one of a known section with an unknown key. Other variables that begin with
`FOREWORD_` are another program's: they have no effect, and one line of the log names them. Among
them are those that Kubernetes sets for each Service whose name begins with `foreword`, such as
`FOREWORD_ROUTER_SERVICE_HOST`, and `FOREWORD_SERVER_PORT=tcp://10.96.0.7:80`.

A router (`foreword route`) reads the sections `server`, `encryption` and `router`, a server all
sections but `router`. What a command does not offer as a flag it does not read: a file may be that
of both. A key of a section that the command reads is then named in the log, as without effect.

Sizes are written `4GiB`, `500MB` or as a number of bytes.
"""


BENCHMARKS_INTRODUCTION = """
Every row names its processor, its date and the file in `benchmarks/` that measures it. All were
measured on two cores with 24 GB and no GPU; TTFT is p50 unless the row says otherwise. Compare the
rows of a table, not absolute times of different machines. [More
tables](../dev/benchmarks.md) are for people who change the code: the engine by processor and on a
GPU, version by version.
"""

BUILDERS_BENCHMARKS_INTRODUCTION = """
Figures that decide what is built. [The others](../docs/benchmarks.md) are for users. What was tried
and failed is in the [lab notes](lab-notes.md).

A benchmark writes its figures with `--json FILE`; a file in `docs/figures/` becomes a table of the
users' page, one in `dev/figures/` a table here. Rows that were published before the benchmarks
wrote such files have the date of their publication.
"""


def benchmarks_page(folder: Path, title: str, introduction: str) -> str:
    """A page of the measured figures in a folder, with processor and date."""
    parts = [
        NOTE.replace("texts in foreword/", f"files in {folder.parent.name}/figures/"),
        f"# {title}",
        _wrapped(introduction),
    ]
    for path in sorted(folder.glob("*.json")):
        figures = json.loads(path.read_text(encoding="utf-8"))
        rows = []
        for row in figures["rows"]:
            about = [row.get(key) or figures[key] for key in ("processor", "date", "command")]
            rows.append((*row["cells"], *about[:2], f"`{about[2]}`"))
        parts += [f"## {figures['title']}", _wrapped(figures.get("text", "")), *map(_wrap, figures.get("run", ()))]
        parts.append(_table((*figures["head"], "processor", "date", "benchmark"), rows) if rows else "")
    return "\n\n".join(filter(None, parts)) + "\n"


def paths_page() -> str:
    """The page about paths, with the first sentence of the docstring of each file in its list."""
    text = PATHS.read_text(encoding="utf-8")
    head, mark, files = text.partition("## Every file of a request")
    above, first, _ = files.partition("| file |")
    names = re.findall(r"^\| `([^`]+)` \|", files, re.MULTILINE)
    assert mark and first and names, "dev/paths.md has lost its list of files"
    rows = [(f"`{name}`", _first_sentence(PACKAGE / name)) for name in sorted(set(names)) if (PACKAGE / name).exists()]
    return head + mark + above + _table(("file", ""), rows) + "\n"


def products_picture() -> str:
    """The products as boxes on floors, each with what it imports, and a line to those that no other import brings already."""
    products = tomllib.loads(PRODUCTS.read_text(encoding="utf-8"))
    needs = {name: set(settings["needs"]) for name, settings in products.items()}
    floors: dict[str, int] = {}
    for name in products:  # those that a product needs stand above it in the file
        floors[name] = 1 + max((floors[need] for need in needs[name]), default=-1)
    width, height, box, top = 980, 118, 72, 14
    rows = [[name for name in products if floors[name] == floor] for floor in range(max(floors.values()) + 1)]
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    for floor, row in enumerate(rows):
        wide = (width - 20) / len(row)
        for at, name in enumerate(row):
            shown = min(wide - 14, 420)
            left = 10 + at * wide + (wide - shown) / 2
            places[name] = (left, top + (len(rows) - 1 - floor) * height, shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(rows) * height}" font-family="sans-serif">',
        "<!-- Written by docs/generate.py from packages/products.toml -->",
        f'<rect width="{width}" height="{len(rows) * height}" rx="8" fill="#ffffff"/>',
    ]
    for name, below in needs.items():
        for need in sorted(below - {far for near in below for far in needs[near]}):
            (left, y, wide), (to, down, broad) = places[name], places[need]
            ends = f'x1="{left + wide / 2:.0f}" y1="{y + box:.0f}" x2="{to + broad / 2:.0f}" y2="{down:.0f}"'
            parts.append(f'<line {ends} stroke="#9fa8da"/>')
    for name, (left, y, wide) in places.items():
        imported = "imports " + ", ".join(products[name]["needs"]) if needs[name] else "imports no other product"
        lines = [*textwrap.wrap(products[name]["subject"], int(wide / 6.2)), *textwrap.wrap(imported, int(wide / 6.2))]
        subjects = len(lines) - len(textwrap.wrap(imported, int(wide / 6.2)))
        tall = max(box, 24 + 13 * len(lines))
        parts.append(
            f'<rect x="{left:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{tall}" rx="6" fill="#e8eaf6" stroke="#3f51b5"/>'
        )
        middle = f'x="{left + wide / 2:.0f}" text-anchor="middle"'
        parts.append(f'<text {middle} y="{y + 17:.0f}" font-size="14" font-weight="bold" fill="#1a237e">{name}</text>')
        for at, line in enumerate(lines):
            color = "#263238" if at < subjects else "#5c6bc0"
            text = xml.sax.saxutils.escape(line)
            parts.append(f'<text {middle} y="{y + 33 + 13 * at:.0f}" font-size="11" fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def comparison_picture(figures: dict[str, Any]) -> str:
    """Groups of bars beside each other, from the rows of a file of figures that have `compared`: the values, and below them the
    date and the processor of their run."""
    rows = [row for row in figures["rows"] if "compared" in row]
    panel, top, row_height, longest = 430, 72, 38, 150
    height = top + row_height * max(len(row["compared"]["values"]) for row in rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {panel * len(rows)} {height}" font-family="sans-serif" '
        'role="img" aria-label="vLLM alone, LMCache and Foreword after a restart, and with nothing to reuse">',
        "<!-- Written by docs/generate.py from docs/figures/10-vllm.json -->",
        f'<rect width="{panel * len(rows)}" height="{height}" rx="8" fill="white"/>',
    ]
    for at, row in enumerate(rows):
        group, left = row["compared"], 16 + at * panel
        unit, most = group["unit"], max(group["values"].values())
        better = "less is better" if unit == "s" else "more is better"
        parts += [
            f'<text x="{left}" y="28" font-size="17" font-weight="bold" fill="#222">{group["title"]}</text>',
            f'<text x="{left}" y="50" font-size="12" fill="#555">{group["text"]} ({better})</text>',
        ]
        for number, (name, value) in enumerate(group["values"].items()):
            y, color = top + row_height * number, _BAR_COLORS[name.partition(",")[0].partition(" ")[0]]
            shown = f"{value:,.1f} s" if unit == "s" else f"{value:g} %"
            length = max(value / most * longest, 2)
            parts += [
                f'<text x="{left + 172}" y="{y + 17}" font-size="13" text-anchor="end" fill="#222">'
                f"{xml.sax.saxutils.escape(name)}</text>",
                f'<rect x="{left + 180}" y="{y}" width="{length:.1f}" height="24" rx="3" fill="{color}"/>',
                f'<text x="{left + 188 + length:.1f}" y="{y + 17}" font-size="13" fill="#222">{shown}</text>',
            ]
        about = f"{row['date']}, {row.get('processor') or figures['processor']}, two cores"
        parts.append(f'<text x="{left}" y="{height - 12}" font-size="11" fill="#777">{about}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\w\.) (?=[A-Z`])", paragraph)[0].rstrip(".")


def readme() -> str:
    """README, with the table of engines: what passed the contract, in which version."""
    rows = []
    for row in json.loads(ENGINES.read_text(encoding="utf-8"))["rows"]:
        passed = sum(outcome == "passed" for outcome in row["tests"].values())
        cannot = [f"{name.removeprefix('test_')}: {why}" for name, why in row["tests"].items() if why != "passed"]
        found = "; ".join([f"{passed} of {len(row['tests'])}", *cannot])
        rows.append((f"[{row['engine']}](docs/guides/{row['guide']})", row["version"], row["how"], found, row["date"]))
    table = _table(("engine", "tested release", "Foreword is", "tests passed", "date"), rows)
    return _with_table(README.read_text(encoding="utf-8"), ENGINES_MARK, table)


def _with_table(page: str, mark: str, table: str) -> str:
    """A page with a table between its marks."""
    before, begin, rest = page.partition(f"{mark}: begin -->")
    _, end, after = rest.partition(f"{mark}: end -->")
    assert begin and end, f"a page has lost the marks of its table: {mark}"
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def http_page() -> str:
    """The page about the HTTP API, with the table of all routes of a server and a router."""
    server = ServerApp(Admission(1), PrometheusObserver(), Config()).front.routes
    router = router_routes(Router(Config()))
    tables = [{(route.shown_path, route.method): route for route in table.shown} for table in (server, router)]
    rows = [
        (
            f"`{method} {path}`",
            _query([table[path, method] for table in tables if (path, method) in table]),
            *(cell for table in tables for cell in _route(table.get((path, method)))),
        )
        for path, method in sorted({*tables[0], *tables[1]})
    ]
    table = _table(("Method and path", "Query", "Server: caller", "quota", "Router: caller", "quota"), rows)
    return _with_table(HTTP.read_text(encoding="utf-8"), ROUTES, table)


def metrics_page() -> str:
    """docs/reference/metrics.md with its tables of what servers, routers and stores count."""
    page = METRICS.read_text(encoding="utf-8")
    server, scraped = PrometheusObserver.declared()
    router = Router(Config())
    metrics = {
        "server": [*_declared(server), *scraped],
        "router": [*_declared(router.metrics), *RouterStateCollector(router).collect()],
    }
    both = {f"foreword:{one.server}" for each in COUNTED.values() for of in each for one in series_of(of)}
    for product, tables in METRIC_TABLES.items():
        rows = {name: list[tuple[str, ...]]() for name in tables}
        for one in metrics[product]:
            name, kind, text, labels = metric_of(one)
            if kind == "counter" and name in both:
                continue  # in the tables of what stores count
            shown = f"{name}_total" if kind == "counter" else name
            table = next(table for table, names in tables.items() if re.match(names, shown))
            meaning = text[0].lower() + text[1:] if text[1].islower() else text
            labelled = f"`{shown}{{{','.join(labels)}}}`" if labels else f"`{shown}`"
            rows[table].append((labelled, kind, meaning.removesuffix(".")))
        for table, found in rows.items():
            mark = f"<!-- docs/generate.py {product}-{table}"
            page = _with_table(page, mark, _table(("metric", "type", "meaning"), found))
    for what, counters in COUNTED.items():
        rows = [
            (
                f"`foreword:{one.server}_total`",
                f"`vllm:foreword_{one.engine}_total`",
                f"`{one.by}`" + (" (servers)" if one.summed else "") if one.by else "",
                one.text[0].lower() + one.text[1:-1],
            )
            for each in counters
            for one in series_of(each)
            if one.kind == "counter"
        ]
        mark = f"<!-- Written by docs/generate.py from the counters of {what}"
        page = _with_table(page, mark, _table(("server", "vLLM connector", "label", "meaning"), rows))
    rows = [
        (
            f"`vllm:foreword_{one.name}{'_total' if one.kind == 'counter' else ''}{{{','.join(labels)}}}`",
            one.kind,
            one.text[0].lower() + one.text[1:-1],
        )
        for one in CONNECTOR_METRICS
        for labels in [("model_name", "engine", *one.labels)]
    ]
    mark = "<!-- Written by docs/generate.py from the connector's own metrics"
    return _with_table(page, mark, _table(("metric", "type", "meaning"), rows))


def _declared(registry: FrontRegistry) -> Iterator[Any]:
    """The metrics that events move."""
    return (one for one in registry._registry._collector_to_names if isinstance(one, MetricWrapperBase))


def metric_of(one: Any) -> tuple[str, str, str, Sequence[str]]:
    """Name, type, text and labels of a metric or a family."""
    if isinstance(one, MetricWrapperBase):
        return one._name, one._type, one._documentation, one._labelnames
    return one.name, one.type, one.documentation, one._labelnames


def _query(routes: list[Route[Any]]) -> str:
    """The parameters of the query, on whichever front."""
    names = {name: None for route in routes for name in route.query.__struct_encode_fields__}
    return ", ".join(f"`{name}`" for name in names)


def _route(route: Route[Any] | None) -> tuple[str, str]:
    return ("", "") if route is None else (route.right.value, route.meter.value)


def cli_page() -> str:
    """The reference of all commands."""
    root = typer.main.get_command(app)
    parts = [NOTE, "# Command line", CLI_INTRODUCTION.strip()]
    for name, command in _commands(root, "foreword"):
        parts += _command(name, command)
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child_name, child in sorted(children.items()):
        yield from _commands(child, f"{name} {child_name}")


def _command(name: str, command: Any) -> list[str]:
    groups: dict[str, list[tuple[str, str]]] = {}
    usage = [name, "[OPTIONS]"]
    with command.context_class(command, info_name=name) as context:
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is None or parameter.name == "help":
                continue
            if parameter.param_type_name == "argument":
                metavar = record[0].split(" ")[0].strip("[]")
                usage.append(metavar if parameter.required else f"[{metavar}]")
                groups.setdefault("Arguments", []).append((metavar, record[1].replace("[required]", "").strip()))
            else:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
    text = " ".join(inspect.cleandoc(command.help or "").split())
    examples = [line for line in (command.epilog or "").splitlines() if line.startswith("  ")]
    shown = "\n".join([" ".join(usage), *map(str.strip, examples)])
    parts = [f"## {name}", _wrap(text), f"```\n{shown}\n```"]
    for title in ("Arguments", "Options"):
        rows = [
            (f"`{flag.partition(' <')[0]}`", " ".join(description.split()))
            for flag, description in groups.pop(title, [])
        ]
        if rows:
            parts += [f"**{title}**", _table((title.removesuffix("s"), "Meaning"), rows)]
    if groups:
        linked = [
            f"[{title}](configuration.md#{title.lower().replace(' ', '-')})"
            for title in SECTIONS.values()
            if title in groups
        ]
        parts.append("Configuration flags: " + ",\n".join(linked) + ".")
    return parts


def configuration_page() -> str:
    """The reference of all configuration keys."""
    parts = [NOTE, "# Configuration", CONFIGURATION_INTRODUCTION.strip()]
    kinds = typing.get_type_hints(Config)
    for section, title in SECTIONS.items():
        summary = " ".join(inspect.cleandoc(kinds[section].__doc__ or "").partition("\n\n")[0].split())
        rows = [
            (
                f"`{flag.key}`",
                "MODEL"
                if (flag.section, flag.key) == ("engine", "model")
                else f"`--{flag.name}`"
                if flag.offered
                else "",
                "" if flag.default in (None, ()) else f"`{flag.shown_default}`",
                flag.text[:1].upper() + flag.text[1:],
            )
            for flag in config_flags()
            if flag.section == section
        ]
        parts += [f"## {title}", _wrap(f"Table `[{section}]`, variables `FOREWORD_{section.upper()}_...`. {summary}")]
        parts.append(_table(("Key", "Flag", "Default", "Meaning"), rows))
    return "\n\n".join(parts) + "\n"


# The public classes and functions of Python, and the files below foreword/ that have them. They are read, not imported: some
# need packages that few users have.
PYTHON_NAMES = (
    ("Cache", "cache.py"),
    ("LLM", "entrypoints/llm.py"),
    ("AsyncEngine", "entrypoints/async_engine.py"),
    ("SamplingParams", "engine/request.py"),
    ("Request", "engine/request.py"),
    ("RequestOutput", "engine/request.py"),
    ("Completion", "engine/request.py"),
    ("CacheReport", "engine/request.py"),
    ("EngineConfig", "engine_config.py"),
    ("PrefixCache", "blocks/prefix_cache.py"),
    ("attach", "integrations/transformers.py"),
    ("AttachedStore", "integrations/transformers.py"),
    ("ForewordCache", "integrations/llama_cpp.py"),
)
PYTHON_INTRODUCTION = """
All names of the first part are in `foreword`, and are typed: `mypy --strict` and editors know the
options of `LLM`. `LLM` and `AsyncEngine` need the extra `engine` (`pip install '.[engine]'` in a
checkout); `Cache` and `PrefixCache` need no torch. Seconds are `float`, sizes are text such as
`4GiB` unless a name ends with `bytes`, tokens are token ids.
"""
# Errors of all products, of named prefixes, of requests, and of transfers.
ERROR_FILES = ("errors.py", "prefixes/errors.py", "request_errors.py", "transfer/errors.py")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Examples|Returns):$", re.MULTILINE)


def python_page() -> str:
    """The reference of Python: constructors with types, and what each parameter and method means."""
    parts = [NOTE, "# Python API", PYTHON_INTRODUCTION.strip()]
    for name, file in PYTHON_NAMES:
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        node = next(one for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name)
        home = "foreword" if name in _exported() else "foreword." + file.removesuffix(".py").replace("/", ".")
        parts.append(f"## {home}.{name}")
        parts += _python_class(node) if isinstance(node, ast.ClassDef) else _python_function(node, name)
    parts += ["## Errors", "Every error that a public function raises is a `foreword.ForewordError`."]
    trees = [ast.parse((PACKAGE / file).read_text(encoding="utf-8")) for file in ERROR_FILES]
    errors = [one for tree in trees for one in tree.body if isinstance(one, ast.ClassDef) and one.name[0] != "_"]
    rows = [(f"`{node.name}`", f"`{ast.unparse(node.bases[0])}`", _flowing(_summary(node))) for node in errors]
    return "\n\n".join([*parts, _table(("Error", "is a", "Meaning"), rows)]) + "\n"


def _exported() -> set[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _python_class(node: ast.ClassDef) -> list[str]:
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    constructor = next((one for one in functions if one.name == "__init__"), None)
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and _is_public(one)]
    types: dict[str, tuple[str, str]]
    if constructor is not None:
        shown, types = _signature(node.name, constructor), _parameters(constructor)
    else:
        types = {ast.unparse(one.target): (ast.unparse(one.annotation), _field_default(one)) for one in fields}
        listed = [f"{name}: {kind}" + (f" = {default}" if default else "") for name, (kind, default) in types.items()]
        shown = _call(node.name, listed, "")
    parts = [f"```python\n{shown}\n```", *_documented(_doc(node), types)]
    if constructor is not None and _doc(constructor):
        parts += _documented(_doc(constructor), types)
    for one in functions:
        if not one.name.startswith("_"):
            parts += [f"### {node.name}.{one.name}", *_python_function(one, one.name)]
    return parts


def _is_public(field: ast.AnnAssign) -> bool:
    """Whether users set it: it has no underscore, and is no constant of a section."""
    value = ast.unparse(field.value) if field.value else ""
    return not ast.unparse(field.target).startswith("_") and not value.startswith("constant(")


def _python_function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> list[str]:
    decorators = {ast.unparse(one) for one in node.decorator_list}
    if "property" in decorators:
        shown = f"{name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    else:
        shown = _signature(("await " if isinstance(node, ast.AsyncFunctionDef) else "") + name, node)
    return [f"```python\n{shown}\n```", *_documented(_doc(node), _parameters(node))]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, tuple[str, str]]:
    """Type and default of each parameter."""
    given, found = node.args, {}
    places = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(places) - len(given.defaults)) + [*given.defaults]
    for one, default in [*zip(places, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]:
        if one.arg not in ("self", "cls"):
            kind = ast.unparse(one.annotation) if one.annotation else ""
            found[one.arg] = (kind, ast.unparse(default) if default else "")
    for more in (given.vararg, given.kwarg):
        if more is not None:
            found[more.arg] = (ast.unparse(more.annotation) if more.annotation else "", "")
    return found


def _signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    given = node.args
    types, listed = _parameters(node), list[str]()
    for one in (*given.posonlyargs, *given.args, "*", *given.kwonlyargs, "**"):
        if one == "*" and (given.vararg or given.kwonlyargs):
            listed.append(f"*{given.vararg.arg}: {types[given.vararg.arg][0]}" if given.vararg else "*")
        elif one == "**" and given.kwarg:
            listed.append(f"**{given.kwarg.arg}: {types[given.kwarg.arg][0]}")
        elif isinstance(one, ast.arg) and one.arg in types:
            kind, default = types[one.arg]
            listed.append(one.arg + (f": {kind}" if kind else "") + (f" = {default}" if default else ""))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return _call(name, listed, returns)


def _call(name: str, listed: list[str], returns: str) -> str:
    line = f"{name}({', '.join(listed)}){returns}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {one},\n" for one in listed) + f"){returns}"


def _field_default(node: ast.AnnAssign) -> str:
    """The default of a dataclass's field. The checks of `foreword.config` take it as their last argument."""
    value = node.value
    if isinstance(value, ast.Call):
        named = {one.arg: one.value for one in value.keywords}
        if "default" in named:
            value = named["default"]
        elif "default_factory" in named:
            return f"{ast.unparse(named['default_factory'])}()"
        elif isinstance(value.func, ast.Name) and value.func.id == "checked":
            value = value.args[0]
        elif value.args:
            value = value.args[-1]
    return "" if value is None else ast.unparse(value)


def _doc(node: ast.AST) -> str:
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return ast.get_docstring(node) or ""


def _summary(node: ast.ClassDef) -> str:
    return _SECTION.split(_doc(node))[0]


def _flowing(text: str) -> str:
    return " ".join(text.split())


def _documented(doc: str, types: dict[str, tuple[str, str]]) -> list[str]:
    """A docstring as paragraphs, a table of its parameters or attributes, and examples as code."""
    first, *rest = _SECTION.split(doc)
    parts = []
    for paragraph in filter(None, map(str.strip, first.split("\n\n"))):
        parts.append(_wrap(_flowing(paragraph)))
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        if title == "Examples":
            code = "\n".join(line.strip().removeprefix(">>> ") for line in text.strip().splitlines())
            parts.append(f"```python\n{code}\n```")
            continue
        rows = []
        for entry in re.split(r"\n(?=    \S)", "\n" + text.strip("\n")):
            names, colon, meaning = entry.strip().partition(":")
            if not colon:
                continue
            for one in names.split(", "):
                kind, default = types.get(one, ("", ""))
                cells = (f"`{kind}`" if kind else "", f"`{default}`" if default else "") if title != "Raises" else ()
                rows.append((f"`{one}`", *cells, _flowing(meaning)))
        heads = (
            ("Raises", "when")
            if title == "Raises"
            else ({"Args": "Parameter"}.get(title, title.removesuffix("s")), "Type", "Default", "Meaning")
        )
        parts.append(_table(heads, rows))
    return parts


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _wrapped(text: str) -> str:
    return "\n\n".join(_wrap(" ".join(paragraph.split())) for paragraph in text.strip().split("\n\n"))


def pages() -> dict[Path, str]:
    """The text of each generated page."""
    return {
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "configuration.md": configuration_page(),
        FIGURES.parent / "benchmarks.md": benchmarks_page(FIGURES, "Benchmarks", BENCHMARKS_INTRODUCTION),
        BUILDERS_FIGURES.parent / "benchmarks.md": benchmarks_page(
            BUILDERS_FIGURES, "Benchmarks for people who change the code", BUILDERS_BENCHMARKS_INTRODUCTION
        ),
        PATHS: paths_page(),
        REFERENCE.parent / "pictures" / "products.svg": products_picture(),
        REFERENCE.parent / "pictures" / "vllm-compared.svg": comparison_picture(
            json.loads((FIGURES / "10-vllm.json").read_text(encoding="utf-8"))
        ),
        REFERENCE / "python.md": python_page(),
        HTTP: http_page(),
        METRICS: metrics_page(),
        README: readme(),
    }


def main() -> int:
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is not up to date; run: python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
