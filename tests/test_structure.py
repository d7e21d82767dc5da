"""The shape of the package: which product imports which, what a user of one product imports, and names that stand twice.

Budgets make growth and dispersion visible. Lower them after deletions; a change that needs more says why.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import pytest
from products import NEEDS, ROOT, closure, imported, imports, lines, package, product_of, upward

import foreword

pytestmark = pytest.mark.extended


def repeated(named: Iterable[tuple[str, str]]) -> set[str]:
    """Names that stand in more than one place."""
    places: dict[str, set[str]] = defaultdict(set)
    for name, place in named:
        places[name].add(place)
    return {name for name, found in places.items() if len(found) > 1}


def statements(modules: Iterable[str]) -> int:
    """Statements of these modules."""
    return sum(isinstance(node, ast.stmt) for name in modules for node in ast.walk(package()[name][1]))


def class_names() -> set[str]:
    """Public classes that stand in two modules."""
    return repeated(
        (node.name, module)
        for module, (_, tree) in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def file_names() -> set[str]:
    """Files that stand in two packages."""
    paths = (path for path, _ in package().values())
    return repeated((path.name, str(path.parent)) for path in paths if path.name != "__init__.py")


def test_a_number_names_one_decision() -> None:
    """Records are referred to by their number: each has its own, in the name of its file and in its title."""
    records = sorted((ROOT.parent / "dev" / "decisions").glob("[0-9]*.md"))
    numbers = [record.name[:4] for record in records]
    assert records and not repeated((number, record.name) for number, record in zip(numbers, records, strict=True))
    assert not [
        record.name for record in records if not record.read_text(encoding="utf-8").startswith(f"# {record.name[:4]}")
    ]


@pytest.mark.parametrize(
    ("what", "count", "budget"),
    [
        ("public classes in two modules", class_names, 2),
        ("files in two packages", file_names, 10),
        ("imports that point up between products", upward, 0),
        ("lines that the vLLM connector imports", lambda: lines(closure("foreword.integrations.vllm")), 20_000),
        ("lines that the router imports", lambda: lines(closure("foreword.router")), 18_000),
        (
            "statements that prefixes for Transformers import",
            lambda: statements(closure("foreword.integrations.transformers")),
            8_000,
        ),
        ("lines that the cache imports", lambda: lines(closure("foreword.cache")), 12_550),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_budgets(what: str, count: Callable[[], int | Collection[str]], budget: int) -> None:
    """The package is within its budgets."""
    found = count()
    number = found if isinstance(found, int) else len(found)
    names = "" if isinstance(found, int) else f": {', '.join(sorted(found))}"
    assert number <= budget, f"{number} {what}, the budget is {budget}{names}"


def test_products() -> None:
    """No product needs one that needs it, and the cache runs without torch, HTTP, and the products above it."""
    order = list(NEEDS)
    assert all(order.index(need) < order.index(product) for product, needs in NEEDS.items() for need in needs)
    found = {product_of(module) for module in closure("foreword.cache")}
    assert found == {"cache"}


def test_counters() -> None:
    """The counters see what they count: this package has lazy imports, and names that stand once."""
    tree = ast.parse("if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d")
    assert sorted(imported(tree, {"a", "b", "c", "c.d"})) == ["b", "c.d"]
    assert product_of("foreword.integrations.vllm.connector") == "vllm" and product_of("foreword.store.tier") == "cache"
    assert "foreword.store.disk.disk_store" in set(imports("foreword.store.builtin"))
    assert "PrefixCache" not in class_names()
    assert "prefix_cache.py" not in file_names()
    assert repeated([("a", "x"), ("a", "y"), ("b", "x"), ("b", "x")]) == {"a"}


@pytest.mark.parametrize("name", foreword.__all__)
def test_public_names(name: str) -> None:
    """Each name that the package offers can be imported."""
    assert getattr(foreword, name).__name__ == name


def test_records_have_kinds() -> None:
    """No code writes or reads records in stores without a kind."""
    calls = {"put_record", "get_record", "delete_record", "read_records"}
    for module, (_, tree) in package().items():
        if not module.startswith(
            # A copy of a store has records of any kind as they are.
            ("foreword.store", "foreword.conformance", "foreword.prefixes.erasure", "foreword.prefixes.store_copy")
        ):
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not used & calls, module


def test_tasks_have_an_owner() -> None:
    """No other module begins a task than `foreword.tasks`, which looks at its error, and those that wait for it themselves."""
    waiting = {"prefixes.prefix_service", "server.migration", "server.generate_api", "router_extras.replica_audit"}
    waiting |= {"router_extras.gateway.external_processor", "store.object.bucket", "entrypoints.async_engine", "tasks"}
    begin = {
        module.removeprefix("foreword.")
        for module, (_, tree) in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    assert begin <= waiting, "use foreword.tasks"


def test_only_one_module_prepares_types() -> None:
    """No other module of the package gives msgspec a type to decode."""
    found = []
    for name, (path, tree) in package().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name == "foreword.decoders":
                continue
            called = ast.unparse(node.func)
            typed = called.startswith("msgspec.") and (
                (called.endswith(".decode") and (len(node.args) > 1 or any(one.arg == "type" for one in node.keywords)))
                or (called.endswith("Decoder") and (node.args or node.keywords))
                or called == "msgspec.convert"
            )
            found += [f"{path}:{node.lineno}: {called}"] if typed else []
    assert not found, "use foreword.decoders"


# First words that name no object.
VAGUE = re.compile(r"(One|Those|What|Of|The same|It|They|Have|Which|That|With|As)\b")


def vague_docstrings(trees: Iterable[tuple[str, ast.Module]]) -> list[str]:
    """Modules, classes and functions whose docstrings name no object first."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{place}:{getattr(node, 'name', '')}"
        for place, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, kinds) and VAGUE.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_name_their_object() -> None:
    """A docstring of the package or of a test begins with a verb or a noun of the field."""
    assert not vague_docstrings(((name, tree) for name, (_, tree) in package().items()))
    folder = ROOT.parent / "tests"
    tests = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(folder.rglob("*.py")))
    assert not vague_docstrings(((path.relative_to(folder).as_posix(), tree) for path, tree in tests))


def test_comments_have_a_subject() -> None:
    """A comment of the package does not begin with a genitive or a relative clause whose subject follows, or is never said."""
    begins = re.compile(r"(?<!#)(?:^|\n)(?! *#)[^\n]*\n *# (?:Of|What) [^\n]*")
    found = [
        f"{path}: {comment[0].strip().splitlines()[-1]}"
        for path in sorted(ROOT.rglob("*.py"))
        for comment in begins.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class Started:
    """A place that starts threads. `most`: jobs that may wait, as the code has it; "" of a loop."""

    name: str
    file: str
    most: str


# Calls that start threads or processes.
STARTS = ("Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "start_new_thread", "Pool")


def started() -> tuple[set[Started], set[str]]:
    """The queues and loops of the package, and the files that start threads or processes in another way."""
    known, others = set[Started](), set[str]()
    for path, tree in package().values():
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in STARTS:
                others.add(file)
            elif called in ("BackgroundJobs", "background_thread") and not file.startswith("conformance/"):
                given = {one.arg: ast.unparse(one.value) for one in node.keywords}
                name = ast.unparse(node.args[called == "background_thread"]).removeprefix("f").strip("'")
                known.add(Started(name, file, given.get("most", "")))
    return known, others


def section(title: str, page: str) -> str:
    """A section of a page for developers."""
    return (ROOT.parent / "dev" / page).read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]


def table(title: str, page: str = "threads.md") -> list[list[str]]:
    """The rows of the table in a section of a page, by default that about threads, without its head."""
    text = section(title, page)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip("`") for cell in row] for row in rows[1:]]


def test_the_page_lists_all_threads() -> None:
    """The page about threads lists each queue with its bound, each loop, and each file that starts threads otherwise; nothing
    else does."""
    known, others = started()
    queues = {
        Started(name, file, "None" if most.startswith("caller: ") else most)
        for name, file, most, _ in table("Queues of jobs")
    }
    loops = {Started(name, file, "") for name, file, _ in table("Loops")}
    assert known - {Started("self.name", "store/background_jobs.py", "")} == queues | loops
    listed = {file for file, _ in table("Threads and processes that are started otherwise")}
    assert others - {"store/background.py"} == listed


# Classes that exclude threads, or coroutines, from each other.
LOCKS = ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore")


def locks(module: str) -> list[tuple[str, str]]:
    """The places that make locks of `threading` or `asyncio`: the file, and the name that each gets there."""
    found = list[tuple[str, str]]()
    for path, tree in package().values():
        inside = {part: node for node in ast.walk(tree) for part in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            made = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.keyword) else None
            if isinstance(made, ast.Attribute) and made.attr in LOCKS and ast.unparse(made.value) == module:
                while not isinstance(node, ast.Assign | ast.AnnAssign):
                    node = inside[node]
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.append((path.relative_to(ROOT).as_posix(), ast.unparse(target)))
    return sorted(found)


@pytest.mark.parametrize(("title", "module"), [("Locks", "threading"), ("Locks of event loops", "asyncio")])
def test_the_page_lists_all_locks(title: str, module: str) -> None:
    """The page about threads lists each place that makes a lock, with what it guards, so that none is added without a look at
    those that there are."""
    listed = table(title)
    assert sorted((file, name) for file, name, _ in listed) == locks(module)
    assert all(guards for *_, guards in listed)


# Words of leases, and those that stood for it once; with forms.
LEASED = "Leases?|Leased|Retentions?|Pins|Pinned|Pinning|Prefetch|Prefetches"
OTHER = "Held|Hold|Kept|Keep|Keeps|Loan|Lent|Reserved|Reservation|Borrowed|Parked"
# Packages that serve requests, or measure, and have no KV themselves.
WITHOUT_KV = ("api", "conformance", "referee", "router", "router_extras", "routing", "sim")


def test_the_page_lists_all_classes_of_leases() -> None:
    """The page about blocks lists each class whose name says that KV stays: as one of leases, which four words name, or among
    those that keep none for later requests."""
    listed = {name: file for name, file, _ in table("Leases: classes and words", "blocks.md")}
    others = set(re.findall(r"`([A-Z]\w+)`", section("Leases: classes and words", "blocks.md"))) - listed.keys()
    found = {
        node.name: path.relative_to(ROOT).as_posix()
        for path, tree in package().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and path.relative_to(ROOT).parts[0] not in WITHOUT_KV
    }
    by_name = {name for name in found if re.search(rf"(?<![A-Z])({LEASED}|{OTHER})(?![a-z])", name) and name[0] != "_"}
    assert {name: found.get(name) for name in listed} == listed
    assert others <= found.keys() and not [name for name in listed if re.search(rf"({OTHER})(?![a-z])", name)]
    assert by_name - listed.keys() - others == set(), "say on the page what it is for"


def test_the_page_about_blocks_names_what_there_is() -> None:
    """Each class, and each member of one, that the page about blocks names is in the package."""
    known: dict[str, str] = {}
    for _, tree in package().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                known[node.name] = known.get(node.name, "") + ast.unparse(node)
    text = (ROOT.parent / "dev" / "blocks.md").read_text(encoding="utf-8")
    found = re.findall(r"`([A-Z]+[a-z]\w+)(?:\.(\w+))?`", text)
    assert len(found) > 100
    assert not [f"{name}.{member}" for name, member in found if not re.search(rf"\b{member}\b", known.get(name, ""))]


def number_of(value: ast.expr) -> float | None:
    """The number that an expression is, such as `64 << 20`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.LShift):
        left, right = number_of(value.left), number_of(value.right)
        return None if left is None or right is None else int(left) << int(right)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, int | float) else None


def numbers_of(tree: ast.Module) -> dict[str, float | None]:
    """The numbers of a module: of its constants, and of arguments of its classes, as `Class.argument`."""
    found: dict[str, float | None] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            together = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            names, values = (target.elts, value.elts) if together else ([target], [value])
            found |= {ast.unparse(name): number_of(one) for name, one in zip(names, values, strict=True) if one}
        for made in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                given = zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)
                last = zip(reversed(made.args.args), reversed(made.args.defaults), strict=False)
                found |= {f"{node.name}.{one.arg}": number_of(value) for one, value in (*given, *last) if value}
    return found


def test_the_page_has_the_limits_of_the_code() -> None:
    """Each number in the table of limits is that of a file which its row names."""
    trees = {path.relative_to(ROOT).as_posix(): tree for path, tree in package().values()}
    compared = 0
    for row in section("Limits", "blocks.md").splitlines():
        known: dict[str, float | None] = {}
        for file in re.findall(r"`([\w/]+\.py)`", row):
            known |= numbers_of(trees[file])
        for name, number in re.findall(r"`([\w.]+)` \(([\d,]+)\)", row):
            assert known.get(name) == int(number.replace(",", "")), name
            compared += 1
    assert compared > 10
