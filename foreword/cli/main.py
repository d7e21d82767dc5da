"""The command line. torch, transformers and the web framework are imported by the commands that need them.

Other modules add commands through `ADDITIONS`: each name in it is a module with `register(app: typer.Typer) -> None`
that is cheap to import.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from foreword.config import Config, load_config
from foreword.errors import BadRequest, ConfigError, ForewordError

if TYPE_CHECKING:
    import httpx

ADDITIONS: tuple[str, ...] = ("foreword.cli.demo", "foreword.cli.store", "foreword.cli.simulate")

app = typer.Typer(
    name="foreword",
    help="A KV cache and a small serving engine for language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
prefix_app = typer.Typer(help="Named prefixes of a running server.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(prefix_app, name="prefix")


def main() -> None:
    """The `foreword` command. Exit status: 0, 2 for a fault of the one who called it, 1 for any other."""
    for name in ADDITIONS:
        import_module(name).register(app)
    try:
        app()
    except ForewordError as error:
        print(f"foreword: {error.message}", file=sys.stderr)
        sys.exit(1 if error.fault == "server" else 2)


# Flags from the configuration's dataclasses

_FLAG_PREFIX = {"engine": "", "server": "", "prefixes": "prefix-", "router": ""}
_POSITIONAL = ("engine", "model")
_FLAG_NAMES = {
    ("store", "urls"): "store",
    ("server", "peers"): "peer",
    ("router", "replicas"): "replica",
    ("router", "tenant_weights"): "tenant-weight",
}
_ENGINES = ("engine", "server", "prefixes", "store", "transfer")
_ROUTERS = ("server", "router")
# Keys of the server that mean nothing to a router.
_NOT_ROUTED = {
    ("server", key) for key in ("max_queue", "router_key", "kv_events", "kv_events_replay", "role", "drain_to", "peers")
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    """One configuration key as a flag. `variable` is its name among the command's arguments."""

    room: str
    key: str
    kind: Any
    text: str
    default: Any

    @property
    def name(self) -> str:
        named = _FLAG_NAMES.get((self.room, self.key))
        return named or _FLAG_PREFIX.get(self.room, f"{self.room}-") + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return self.name.replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        """None stands for "not given": then the environment, the file or the default decides."""
        shown = f"--{self.name}/--no-{self.name}" if self.kind is bool else f"--{self.name}"
        option = typer.Option(None, shown, help=self.help, show_default=False)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.variable, kind, default=option, annotation=self.kind | None)

    @property
    def help(self) -> str:
        if self.default in (None, ()):
            return self.text
        default = {True: "on", False: "off"}.get(self.default, self.default) if self.kind is bool else self.default
        return f"{self.text} [{default}]"


def _flags() -> Iterator[_Flag]:
    for room, kind in typing.get_type_hints(Config).items():
        texts = _attribute_texts(kind.__doc__ or "")
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            yield _Flag(room, item.name, _flag_type(hints[item.name]), texts.get(item.name, ""), item.default)


def _flag_type(hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wanted = next(option for option in options if option is not type(None))
    return list[str] if typing.get_origin(wanted) is tuple else wanted


def _attribute_texts(doc: str) -> dict[str, str]:
    """What a class's docstring says about each attribute, so that flags need no second description."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(doc).partition("Attributes:")[2].splitlines():
        if match := re.fullmatch(r"    ([a-z_]+(?:, [a-z_]+)*): (.+)", line):
            names = match[1].split(", ")
            texts |= dict.fromkeys(names, match[2])
        elif line.startswith("        "):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the argument MODEL, the flag --config and a flag per configuration key.

    The command is called with the resulting `Config`, and with its own further keyword arguments. Raises ConfigError.
    """
    return _with_flags(command, {flag.variable: flag for flag in _flags() if flag.room in _ENGINES})


def with_router_config(command: Callable[..., None]) -> Callable[..., None]:
    """The same without MODEL, and with the keys of a router."""
    flags = {flag.variable: flag for flag in _flags() if flag.room in _ROUTERS}
    return _with_flags(
        command, {name: flag for name, flag in flags.items() if (flag.room, flag.key) not in _NOT_ROUTED}
    )


def _with_flags(command: Callable[..., None], given: dict[str, _Flag]) -> Callable[..., None]:
    flags = {variable: flag for variable, flag in given.items() if (flag.room, flag.key) != _POSITIONAL}
    takes_model = len(flags) < len(given)
    own = [item for item in inspect.signature(command, eval_str=True).parameters.values() if item.name != "config"]

    def run(config: Path | None, model: str | None = None, **given: Any) -> None:
        chosen: dict[str, dict[str, Any]] = {}
        for variable, flag in flags.items():
            value = given.pop(variable)
            if value not in (None, []):
                chosen.setdefault(flag.room, {})[flag.key] = value
        if model is not None:
            chosen.setdefault("engine", {})["model"] = model
        command(load_config(config, flags=chosen), **given)

    first = [_model_parameter()] if takes_model else []
    parameters = [*first, _file_parameter(), *own, *(flag.parameter() for flag in flags.values())]
    return _disguise(run, command, parameters)


def _model_parameter() -> inspect.Parameter:
    text = "A folder or a hub name; the embedded model if not given."
    annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help=text, show_default=False)]
    return inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _file_parameter() -> inspect.Parameter:
    annotation = Annotated[Path | None, typer.Option("--config", help="A TOML file with the configuration.")]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _disguise(
    run: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Typer reads signature and annotations: give `run` the ones that it really takes."""
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


# foreword serve, foreword doctor, foreword route


@app.command()
@with_config
def serve(config: Config) -> None:
    """Serve a model over HTTP, with OpenAI's interface."""
    from foreword.server.process import run

    raise typer.Exit(run(config))


@app.command()
@with_config
def doctor(
    config: Config,
    *,
    load: Annotated[bool, typer.Option("--load/--no-load", help="Load the model and check that it computes.")] = True,
) -> None:
    """Say what this machine and this configuration are good for; status 1 if something would not work."""
    from foreword.cli.doctor import examine

    healthy = True
    for finding in examine(config, load):
        healthy &= finding.fine
        print(f"{'ok  ' if finding.fine else 'FAIL'}  {finding.topic:<10} {finding.text}", flush=True)
    raise typer.Exit(0 if healthy else 1)


@app.command()
@with_router_config
def route(config: Config) -> None:
    """Route requests to replicas: where the prefix is, unless waiting there costs more."""
    from foreword.router.process import run

    raise typer.Exit(run(config))


# foreword prefix

ServerOption = Annotated[str, typer.Option("--server", help="Where the server listens.")]
KeyOption = Annotated[str | None, typer.Option("--api-key", help="If the server asks for one.")]
DEFAULT_SERVER = "http://127.0.0.1:8000"


@prefix_app.command("add")
def prefix_add(
    name: str,
    *,
    text: Annotated[str | None, typer.Option("--text", help="The prefix itself.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with the prefix; - reads standard input.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", help="A JSON file with a list of chat messages.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Make a new version if the name exists.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: KeyOption = None,
) -> None:
    """Compute a prefix on the server, pin it and name it."""
    body = _prefix_body(text, file, messages)
    made = call_server(server, api_key, "POST", "/v1/prefixes", {"name": name, "replace": replace, **body})
    print(_summary(made))


@prefix_app.command("list")
def prefix_list(*, server: ServerOption = DEFAULT_SERVER, api_key: KeyOption = None) -> None:
    """All named prefixes, with their size and use."""
    found = call_server(server, api_key, "GET", "/v1/prefixes")
    for prefix in found["data"]:
        print(_summary(prefix))
    budget = found["budget_bytes"]
    limit = "its stores set no bound" if budget is None else f"the server's budget is {budget}"
    print(f"{found['pinned_bytes']} bytes pinned, {limit}")


@prefix_app.command("show")
def prefix_show(name: str, *, server: ServerOption = DEFAULT_SERVER, api_key: KeyOption = None) -> None:
    """One prefix with its content, as JSON."""
    print(json.dumps(call_server(server, api_key, "GET", _prefix_path(name)), indent=2, ensure_ascii=False))


@prefix_app.command("remove")
def prefix_remove(name: str, *, server: ServerOption = DEFAULT_SERVER, api_key: KeyOption = None) -> None:
    """Forget a prefix."""
    removed = call_server(server, api_key, "DELETE", _prefix_path(name))
    print(f"removed {removed['id']} (version {removed['version']})")


def _prefix_body(text: str | None, file: Path | None, messages: Path | None) -> dict[str, Any]:
    if sum(source is not None for source in (text, file, messages)) != 1:
        raise ConfigError("give the prefix with exactly one of --text, --file and --messages")
    if text is not None:
        return {"content": text}
    if file is not None:
        return {"content": _read(file)}
    assert messages is not None
    try:
        return {"messages": json.loads(_read(messages))}
    except json.JSONDecodeError as error:
        raise ConfigError(f"{messages} is not valid JSON: {error}") from error


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8") from error


def _prefix_path(name: str) -> str:
    from urllib.parse import quote

    return f"/v1/prefixes/{quote(name, safe='')}"


def _summary(prefix: Mapping[str, Any]) -> str:
    size = f"{prefix['num_tokens']} tokens, {prefix['bytes']} bytes"
    used = f"{prefix['uses']} uses, {prefix['hit_tokens']} tokens hit"
    return f"{prefix['name']}  version {prefix['version']}  {prefix['kind']}  {size}  {used}"


def call_server(server: str, api_key: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask a server. Raises BadRequest with the server's own sentence, or ConfigError if there is no such server."""
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # Computing a long prefix takes as long as it takes.
        timeout = httpx.Timeout(10, read=None)
        answer = httpx.request(method, server.rstrip("/") + path, json=body, headers=headers, timeout=timeout)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(f"no answer from {server}: {error} (--server)") from error
    return _unwrap(server, answer)


def _unwrap(server: str, answer: httpx.Response) -> Any:
    try:
        body = answer.json()
    except ValueError:
        raise ConfigError(f"{server} did not answer as a Foreword server does (HTTP {answer.status_code})") from None
    if not answer.is_success:
        _complain(server, answer, body)
    return body


def _complain(server: str, answer: httpx.Response, body: Any) -> NoReturn:
    status = answer.status_code
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error  # vLLM asks for its key with a bare text
    if not isinstance(message, str):
        raise ConfigError(f"{server} did not answer as a Foreword server does (HTTP {status}){_missing(answer)}")
    if status >= 500:
        raise ForewordError(message)
    raise BadRequest(message)


def _missing(answer: httpx.Response) -> str:
    if answer.status_code != 404 or not answer.request.url.path.startswith("/v1/prefixes"):
        return ""
    return "; vLLM has named prefixes with --middleware foreword.integrations.vllm.NamedPrefixes"


if __name__ == "__main__":
    main()
