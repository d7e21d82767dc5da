"""The configuration of a command that serves, which is read from a TOML file, the environment and flags.

Flags override the environment, the environment overrides the file. The file has a table per section (`[engine]`,
`[server]`, ...). An environment variable is named after section and key: `FOREWORD_ENGINE_BLOCK_SIZE=16`. There is one flag per
key, grouped by section in the help; its help is the description of the key in the dataclass's docstring.

Others set variables of that form, too: Kubernetes does for each Service whose name begins with `foreword`. Those of no section
have no effect, and a line of the log names them. What is close to the name of a key is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import typer

from foreword.config import keys_of
from foreword.config_files import read_tables
from foreword.config_layers import ENV_PREFIX, build, file_keys, is_service_variable, merged_layers
from foreword.configuration import Config
from foreword.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

# How much the names of two variables have in common if one was probably meant by the other, as difflib counts.
_CLOSE: Final = 0.85
_MOST_NAMES: Final = 100
SECTIONS = {
    "engine": "Engine",
    "server": "Server",
    "prefixes": "Named prefixes",
    "store": "Stores",
    "encryption": "Encryption of stores",
    "transfer": "KV transfer between instances",
    "router": "Router",
}
_ENGINE_SECTIONS = ("engine", "server", "prefixes", "store", "encryption", "transfer")
_ROUTER_SECTIONS = ("server", "encryption", "router")
# Keys of these sections that a router does not have.
_NOT_FOR_ROUTERS = {("encryption", "read_plain")} | {
    ("server", key)
    for key in (
        "max_queue",
        "router_key",
        "kv_events",
        "kv_events_open",
        "role",
        "drain_to",
        "peers",
        "tool_parser",
        "reasoning_parser",
    )
}
# Options that `--help` lists of every command that listens.
LISTENING = ("config", "host", "port", "api-keys", "log-level")
_POSITIONAL = ("engine", "model")
_NOT_FLAGS = {("encryption", "master_keys")}  # what a command line shows to every user of the machine
_NAME_PREFIX = {"engine": "", "server": "", "prefixes": "prefix-", "router": ""}
_NAMES = {
    ("store", "urls"): "store",
    ("server", "peers"): "peer",
    ("server", "quotas"): "quota",
    ("router", "replicas"): "replica",
    ("router", "replica_services"): "replica-service",
    ("router", "tenant_weights"): "tenant-weight",
    ("router", "tenant_priorities"): "tenant-priority",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigFlag:
    """A configuration key as a flag. `variable` is its name among the command's arguments, `file_of` the secret key that is in
    the file that it names."""

    section: str
    key: str
    kind: Any
    text: str
    default: Any
    file_of: str = ""
    secret: bool = False

    @property
    def name(self) -> str:
        given = _NAMES.get((self.section, self.key))
        if given is None and (self.section, self.file_of) in _NAMES:
            given = f"{_NAMES[self.section, self.file_of]}-file"
        return given or _NAME_PREFIX.get(self.section, f"{self.section}-") + self.key.replace("_", "-")

    @property
    def offered(self) -> bool:
        """Whether commands have the flag. A secret key is for files and the environment."""
        return (self.section, self.key) not in _NOT_FLAGS

    @property
    def variable(self) -> str:
        return self.name.replace("-", "_")

    @property
    def help(self) -> str:
        text = self.text[:1].upper() + self.text[1:]
        if self.kind == list[str]:
            text += " May be repeated."
        return text if self.default in (None, ()) else f"{text} [default: {self.shown_default}]"

    @property
    def shown_default(self) -> str:
        if self.kind is bool:
            return "on" if self.default else "off"
        return ", ".join(self.default) if isinstance(self.default, tuple) else str(self.default)

    def parameter(self) -> inspect.Parameter:
        """The parameter for typer. None means "not given": then the environment, the file or the default decides."""
        shown = f"--{self.name}/--no-{self.name}" if self.kind is bool else f"--{self.name}"
        panel = SECTIONS[self.section]
        option = typer.Option(None, shown, help=self.help, show_default=False, rich_help_panel=panel)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.variable, kind, default=option, annotation=self.kind | None)


def config_flags() -> Iterator[ConfigFlag]:
    """The flags of all sections."""
    for section, kind in get_type_hints(Config).items():
        texts = attribute_texts(kind.__doc__ or "")
        hints = get_type_hints(kind)
        for item in keys_of(kind):
            wanted = _flag_type(hints[item.name])
            yield ConfigFlag(section, item.name, wanted, texts.get(item.name, ""), item.default, secret=not item.repr)
        for file, name in file_keys(kind).items():
            lines = ", one per line" if _flag_type(hints[name]) == list[str] else ""
            yield ConfigFlag(section, file, str, f"file with `{name}`{lines}.", None, name)


def attribute_texts(doc: str) -> dict[str, str]:
    """The description of each attribute in a class's docstring."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(doc).partition("Attributes:")[2].splitlines():
        if match := re.fullmatch(r"    ([a-z_]+(?:, [a-z_]+)*): (.+)", line):
            names = match[1].split(", ")
            texts |= dict.fromkeys(names, match[2])
        elif line.startswith("        "):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def _flag_type(hint: Any) -> Any:
    options = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wanted = next(option for option in options if option is not type(None))
    return list[str] if get_origin(wanted) is tuple else wanted


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the argument MODEL, the flag --config and a flag per key of a server.

    The command is called with the resulting `Config`, and with its other keyword arguments. Raises ConfigError.
    """
    return _with_flags(command, server_flags())


def with_given(command: Callable[..., None], known: list[ConfigFlag]) -> Callable[..., None]:
    """Flags of a command with these keys, which is called with the `GivenConfig` itself."""
    return _with_flags(command, known, whole=True)


def with_router_config(command: Callable[..., None]) -> Callable[..., None]:
    """Flags of a command without MODEL, and with the keys of a router."""
    return _with_flags(command, router_flags())


def server_flags() -> list[ConfigFlag]:
    """The keys that a server reads."""
    return [flag for flag in config_flags() if flag.section in _ENGINE_SECTIONS]


def router_flags() -> list[ConfigFlag]:
    """The keys that a router reads."""
    flags = [flag for flag in config_flags() if flag.section in _ROUTER_SECTIONS]
    return [flag for flag in flags if (flag.section, flag.file_of or flag.key) not in _NOT_FOR_ROUTERS]


def _with_flags(command: Callable[..., None], known: list[ConfigFlag], *, whole: bool = False) -> Callable[..., None]:
    flags = [flag for flag in known if flag.offered and (flag.section, flag.key) != _POSITIONAL]
    keys = {(flag.section, flag.key) for flag in known}
    taken = inspect.signature(command, eval_str=True).parameters.values()
    own = [item for item in taken if item.name not in ("config", "found")]

    def run(config: Path | None, model: str | None = None, **given: Any) -> None:
        chosen: dict[str, dict[str, Any]] = {}
        for flag in flags:
            value = given.pop(flag.variable)
            if "" in (value, *(value if isinstance(value, list) else ())):
                raise ConfigError(f"--{flag.name} is empty: give it a value, or leave it out")
            if value not in (None, []):
                chosen.setdefault(flag.section, {})[flag.key] = value
        if model == "":
            raise ConfigError("MODEL is empty: name one, or leave it out for the embedded model")
        if model is not None:
            chosen.setdefault("engine", {})["model"] = model
        found = GivenConfig.read(config, os.environ, chosen)
        if whole:
            command(found, **given)
            return
        merged = found.config(keys)
        if notes := found.notes(keys, command.__name__):
            from foreword.api.http import configure_logging

            configure_logging(merged.server.log_level, merged.server.log_format)
            for note in notes:
                logger.warning("%s", note)
        command(merged, **given)

    positional = [_model_parameter()] if any((flag.section, flag.key) == _POSITIONAL for flag in known) else []
    parameters = [*positional, _file_parameter(), *own, *(flag.parameter() for flag in flags)]
    # Typer reads the name, the docstring, the signature and the annotations.
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _model_parameter() -> inspect.Parameter:
    text = "Folder or Hugging Face name of the model; by default the embedded model."
    annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help=text, show_default=False)]
    return inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _file_parameter() -> inspect.Parameter:
    annotation = Annotated[Path | None, typer.Option("--config", help="TOML file with the configuration.")]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_SECTIONS: Mapping[str, type[Any]] = get_type_hints(Config)


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Read the configuration from file, environment and flags (`{"engine": {"block_size": 32}}`), the last one strongest.

    Raises ConfigError for an unreadable file, an unknown table or key, or a wrong value.
    """
    return GivenConfig.read(path, os.environ if environ is None else environ, flags or {}).config()


_Layer = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class GivenConfig:
    """A configuration as it is given.

    Attributes:
        layers: file, environment and flags, the last one strongest.
        foreign: variables of the environment that mean no key.
        file: the configuration file, if there is one.
    """

    layers: tuple[_Layer, _Layer, _Layer]
    foreign: Sequence[str]
    file: Path | None = None

    @classmethod
    def read(cls, path: Path | None, environ: Mapping[str, str], flags: _Layer) -> GivenConfig:
        """Raises ConfigError."""
        variables, foreign = _read_environment(environ)
        return cls((_read_file(path), variables, flags), foreign, path)

    def source(self, flag: ConfigFlag) -> str:
        """Where the value of a key comes from; empty for a default. Of a secret and the file with it the stronger counts."""
        file, variables, flags = (layer.get(flag.section, {}) for layer in self.layers)
        beside = next((one for one, name in file_keys(_SECTIONS[flag.section]).items() if name == flag.key), "")
        keys = {flag.key, flag.file_of, beside} - {""}
        for layer, where in (
            (flags, "MODEL" if (flag.section, flag.key) == _POSITIONAL else f"--{flag.name}"),
            (variables, f"{ENV_PREFIX}{flag.section}_{flag.key}".upper()),
            (file, f"[{flag.section}] in {self.file}"),
        ):
            # An empty name of a file takes no secret away, as in `merged_layers`.
            if found := {key for key in keys & {*layer} if layer[key] or key != beside}:
                return where if flag.key in found else ""
        return ""

    def value(self, flag: ConfigFlag) -> Any:
        """The value of a key as the strongest place gives it."""
        return next(
            layer[flag.section][flag.key] for layer in reversed(self.layers) if flag.key in layer.get(flag.section, {})
        )

    def config(self, keys: Collection[tuple[str, str]] | None = None) -> Config:
        """The configuration; of a command that reads only these keys, the others have their defaults. Raises ConfigError for an
        unknown key or a wrong value, also where it is not read."""
        sections: dict[str, Any] = {}
        for name, kind in _SECTIONS.items():
            merged = merged_layers(kind, (layer.get(name, {}) for layer in self.layers))
            sections[name] = build(kind, name, merged)
            if keys is not None:
                sections[name] = build(kind, name, {key: merged[key] for key in merged if (name, key) in keys})
        return Config(**sections)

    def notes(self, keys: Collection[tuple[str, str]], command: str) -> list[str]:
        """Lines for the log about what was given and has no effect, where the command reads these keys. One file may be that
        of a server and a router, so that whole sections of the other one are no mistake."""
        found = []
        if self.foreign:
            more = f" and {len(self.foreign) - _MOST_NAMES} more" if len(self.foreign) > _MOST_NAMES else ""
            found.append(
                f"ignored environment variables, which are not Foreword's: {', '.join(self.foreign[:_MOST_NAMES])}{more}"
            )
        sections = {section for section, _ in keys}
        given = {(section, key) for layer in self.layers for section, table in layer.items() for key in table}
        unread = sorted(f"{section}.{key}" for section, key in given - {*keys} if section in sections)
        if unread:
            found.append(f"without effect in foreword {command}: {', '.join(unread)}")
        return found


def _read_file(path: Path | None) -> _Layer:
    if path is None:
        return {}
    tables = read_tables(path)
    for name in tables:
        if name not in _SECTIONS:
            raise ConfigError(f"{path}: unknown table [{name}]{did_you_mean(name, _SECTIONS)}")
    return tables


def _read_environment(environ: Mapping[str, str]) -> tuple[_Layer, list[str]]:
    """Variables `FOREWORD_<SECTION>_<KEY>`, and the names of those that begin with FOREWORD_ and mean no key.

    Raises ConfigError for what was probably meant for one.
    """
    found: dict[str, dict[str, Any]] = {}
    foreign, services = list[str](), list[str]()
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        given = name.removeprefix(ENV_PREFIX)
        section, _, key = given.lower().partition("_")
        if is_service_variable(given, value):
            services.append(name)
        elif section in _SECTIONS:
            found.setdefault(section, {})[key] = value
        elif meant := _meant(given.lower()):
            raise ConfigError(f"environment variable {name}: unknown section {section!r}. Did you mean {meant}?")
        else:
            foreign.append(name)
    return found, foreign + services


def _meant(given: str) -> str:
    """The variable that was probably meant by one without a known section: one whose name is close, or that of a key of several
    words. A single word such as `seed` or `port` is more likely another program's."""
    keys = {f"{section}_{item.name}": item.name for section, kind in _SECTIONS.items() for item in keys_of(kind)}
    close = difflib.get_close_matches(given, keys, n=1, cutoff=_CLOSE)
    close += [name for name, key in keys.items() if key == given and "_" in key]
    return f"{ENV_PREFIX}{close[0].upper()}" if close else ""
