"""The configuration: files, environment, flags, and error messages."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli.flags import GivenConfig, config_flags, load_config, server_flags
from foreword.config import keys_of, parse_bytes
from foreword.config_layers import build, file_keys
from foreword.configuration import Config
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.errors import ConfigError
from foreword.process_config import ServerConfig

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "foreword.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    """Without a file, a variable or a flag every section has its defaults."""
    assert load_config(environ={}) == Config()


def test_precedence(tmp_path: Path) -> None:
    """Flags are stronger than the environment, and the environment is stronger than the file."""
    path = write(tmp_path, "[engine]\nblock_size = 8\nmax_num_seqs = 8\nthreads = 8\n")
    environ = {"FOREWORD_ENGINE_BLOCK_SIZE": "16", "FOREWORD_ENGINE_MAX_NUM_SEQS": "16"}
    engine = load_config(path, environ, {"engine": {"block_size": 32}}).engine
    assert (engine.block_size, engine.max_num_seqs, engine.threads) == (32, 16, 8)


def test_file_values_keep_their_types(tmp_path: Path) -> None:
    """Every type that TOML has arrives as the type that the field has."""
    text = '[engine]\nmodel = "m"\nreserve = 0.5\nself_check = false\n[server]\napi_keys = ["a=12345678", "87654321"]\n'
    config = load_config(write(tmp_path, text), {})
    assert config.engine == EngineConfig(model="m", reserve=0.5, self_check=False)
    assert config.server.api_keys == ("a=12345678", "87654321")


def test_environment_values_are_parsed() -> None:
    """Text from the environment becomes numbers, switches, lists and None."""
    environ = {
        "FOREWORD_ENGINE_MAX_MODEL_LEN": "128",
        "FOREWORD_ENGINE_RESERVE": "0.25",
        "FOREWORD_ENGINE_SELF_CHECK": "off",
        "FOREWORD_ENGINE_THREADS": "",
        "FOREWORD_SERVER_API_KEYS": "a=one, two",
        "FOREWORD_PREFIXES_BUDGET": "1GiB",
        "HOME": "/home",
    }
    config = load_config(environ=environ)
    assert config.engine == EngineConfig(max_model_len=128, reserve=0.25, self_check=False, threads=None)
    assert config.server.api_keys == ("a=one", "two")
    assert config.prefixes.budget_bytes(0) == 2**30


@pytest.mark.parametrize("section", [section.name for section in dataclasses.fields(Config)])
def test_unknown_key_names_close_ones(section: str) -> None:
    """A misspelt key in any section is an error that names the key and the one that was meant."""
    kind = type(getattr(Config(), section))
    right = dataclasses.fields(kind)[0].name
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, flags={section: {right + "x": 1}})
    assert f"{section}.{right}x" in caught.value.message
    assert f"Did you mean '{right}'" in caught.value.message


def test_unknown_table_names_close_ones(tmp_path: Path) -> None:
    """A misspelt table in the file is an error that names the right one and the file."""
    path = write(tmp_path, "[engin]\nblock_size = 8\n")
    with pytest.raises(ConfigError, match=r"\[engin\].*'engine'") as caught:
        load_config(path, {})
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ENGIN_BLOCK_SIZE", "FOREWORD_ENGINE_BLOCK_SIZE"),
        ("ENGINE_BLOK_SIZE", "'block_size'"),
        ("ENGINE_BLOCKSIZE", "'block_size'"),
        ("SERVR_PORT", "FOREWORD_SERVER_PORT"),
        ("SERVER_PROT", "'port'"),
        ("PREFIX_BUDGET", "FOREWORD_PREFIXES_BUDGET"),
        ("API_KEYS", "FOREWORD_SERVER_API_KEYS"),
        ("LOG_LEVEL", "FOREWORD_SERVER_LOG_LEVEL"),
        ("ROUTERS_REPLICAS", "FOREWORD_ROUTER_REPLICAS"),
        ("SERVER_SERVICE_PORTS", "known"),
    ],
)
def test_misspelt_variables_are_errors(name: str, meant: str) -> None:
    """A variable whose name is close to that of a key is an error that suggests the key, so that a typo is not ignored."""
    with pytest.raises(ConfigError, match=f"(?i)unknown .*{re.escape(meant)}"):
        load_config(environ={f"FOREWORD_{name}": "1"})


@pytest.mark.parametrize("name", ["DEBUG", "VLLM_PYTHON", "SEED", "PORT", "TEST_SECRET", "HOME", "ROUTE_URL", ""])
def test_variables_of_others_are_ignored(name: str) -> None:
    """A variable that begins with FOREWORD_ and is close to no key is another program's: it has no effect, and is named."""
    given = GivenConfig.read(None, {f"FOREWORD_{name}": "1", "FOREWORD_ENGINE_SEED": "7"}, {})
    assert given.config() == Config(engine=EngineConfig(seed=7))
    [note] = given.notes([("engine", "seed")], "serve")
    assert note.endswith(f": FOREWORD_{name}")


def test_keys_of_another_command_are_named(tmp_path: Path) -> None:
    """A key that a file or the environment sets in a section of the command, and the command does not read, is named; whole
    sections of other commands are not, since a file may be that of several."""
    path = write(tmp_path, "[engine]\nblock_size = 8\n[server]\nport = 1\nmax_queue = 5\n")
    given = GivenConfig.read(path, {"FOREWORD_SERVER_ROLE": "both"}, {})
    assert given.notes([("server", "port")], "route") == [
        "without effect in foreword route: server.max_queue, server.role"
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[engine", "not valid TOML"),
        ("engine = 3", "must be a table"),
        ('[engine]\nblock_size = "many"', "engine.block_size must be of type int, not 'many'"),
        ("[engine]\nblock_size = 1.5", "engine.block_size must be of type int"),
        ("[engine]\nblock_size = true", "engine.block_size must be of type int"),
        ("[engine]\nself_check = 1", "engine.self_check must be of type bool"),
        ("[engine]\nmodel = []", "engine.model must be of type str"),
        ("[engine]\nblock_size = 0", "engine.block_size must be at least 1, not 0"),
        ("[engine]\nreserve = 1.0", "engine.reserve"),
        ("[engine]\nreserve = nan", "engine.reserve"),
        ('[engine]\ndtype = "int8"', "engine.dtype must be"),
        ("[server]\nport = 65536", "server.port must be between 0 and 65535"),
        ('[server]\nlog_level = "loud"', "server.log_level must be"),
        ("[server]\nmax_queue = 0", "server.max_queue must be at least 1"),
        ("[server]\napi_keys = 5", "server.api_keys"),
        ('[prefixes]\nbudget = "100%"', "prefixes.budget must be between"),
        ('[prefixes]\nbudget = "lots"', "not a size in bytes"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, sentence: str) -> None:
    """Each mistake in a file is a ConfigError whose sentence says what was wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), {})
    assert sentence in caught.value.message


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    """A file that cannot be read is an error that names it."""
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / "binary.toml"):
        with pytest.raises(ConfigError) as caught:
            load_config(path, {})
        assert str(path) in caught.value.message


@given(st.integers(0, 2**40), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_bytes_are_read_in_every_unit(number: int, unit: str, gap: str) -> None:
    """A whole number of any unit is exactly that many bytes, in upper and lower case."""
    if number * UNITS[unit] >= 2**53:
        number %= 1000
    for text in (f"{number}{gap}{unit}", f" {number}{gap}{unit.lower()} "):
        assert parse_bytes(text) == number * UNITS[unit]


@given(st.text(max_size=40) | st.from_regex(r"[0-9.]+ ?[kKmMgG]?[iI]?[bB]?"))
def test_bytes_never_surprise(text: str) -> None:
    """Any text is a number of bytes that is not negative, or a ConfigError; nothing else."""
    try:
        assert parse_bytes(text) >= 0
    except ConfigError as error:
        assert repr(text) in error.message


def test_huge_sizes_do_not_overflow() -> None:
    """A number of bytes with hundreds of digits is a number or a ConfigError, not a crash."""
    with contextlib.suppress(ConfigError):
        assert parse_bytes("9" * 400 + "GiB") > 0


@given(st.integers(0, 2**40), st.floats(0, 90))
def test_budget_is_a_share_of_the_pool(pool: int, share: float) -> None:
    """A budget in percent is that share of the pool and never more than it."""
    budget = PrefixConfig(budget=f"{share:.2f}%").budget_bytes(pool)
    assert 0 <= budget <= pool
    assert math.isclose(budget, pool * float(f"{share:.2f}") / 100, abs_tol=1)


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig, PrefixConfig])
@given(data=st.data())
def test_any_value_is_taken_or_explained(kind: type[Any], data: st.DataObject) -> None:
    """Whatever a key is set to, the result is a configuration or a ConfigError; nothing else is raised."""
    key = data.draw(st.sampled_from([item.name for item in dataclasses.fields(kind)]))
    value = data.draw(json_values)
    try:
        built = build(kind, "section", {key: value})
    except ConfigError as error:
        assert error.message
    else:
        assert isinstance(built, kind)


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=10), max_size=4))
def test_any_environment_is_taken_or_explained(environ: dict[str, str]) -> None:
    """Whatever the environment holds under FOREWORD_, the result is a configuration or a ConfigError."""
    variables = {f"FOREWORD_{name}": value for name, value in environ.items()}
    try:
        load_config(environ=variables)
    except ConfigError as error:
        assert "FOREWORD_" in error.message or "unknown" in error.message or "must be" in error.message


SECRETS = {
    ("server", "api_keys"): "alice=QuietPlease,QuietPlease",
    ("server", "tenant_secret"): "QuietPlease-QuietPlease",
    ("server", "admin_key"): "QuietPlease",
    ("server", "router_key"): "QuietPlease",
    ("store", "urls"): "redis://:QuietPlease@localhost",
    ("transfer", "secret"): "QuietPlease-QuietPlease",
    ("router", "replica_key"): "QuietPlease",
    ("encryption", "key_store"): "rediss://:QuietPlease@10.0.0.1/?prefix=keys",
    ("encryption", "master_keys"): "QuietPlease:" + "00" * 32,
}


@pytest.mark.parametrize("given", ["file:{}", ["file:{}"], "carl=k3,file:{}"])
def test_a_list_of_secrets_from_a_file(tmp_path: Path, given: str | list[str]) -> None:
    """A file has one secret a line, also where the list is text, as in the environment."""
    (tmp_path / "keys").write_text("alice=k1\nbob=k2\n")
    path = str(tmp_path / "keys")
    value = given.format(path) if isinstance(given, str) else [one.format(path) for one in given]
    assert build(ServerConfig, "server", {"api_keys": value}).api_keys[-2:] == ("alice=k1", "bob=k2")


@dataclasses.dataclass(frozen=True, slots=True)
class NewSection:
    """A section as the next one may be: its author has thought of no file."""

    password: str | None = dataclasses.field(default=None, repr=False)
    passwords: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    port: int = 0


def test_every_secret_has_a_file(tmp_path: Path) -> None:
    """A key that is not printed has a second one, `NAME_file`, without a word of its author: the file contains it, a list has
    one a line. A path with two slashes and one with a comma are paths."""
    (tmp_path / "a,b").write_text("  one,two \n")
    path = str(tmp_path / "a,b")
    assert build(NewSection, "new", {"password_file": path}) == NewSection(password="one,two")
    assert build(NewSection, "new", {"passwords_file": f"/{path}"}) == NewSection(passwords=("one,two",))
    assert file_keys(NewSection) == {"password_file": "password", "passwords_file": "passwords"}
    with pytest.raises(ConfigError, match="unknown configuration key new"):
        build(NewSection, "new", {"port_file": path})
    with pytest.raises(ConfigError, match="not both"):
        build(NewSection, "new", {"password_file": path, "password": "x"})


def test_the_stronger_of_a_secret_and_its_file_holds(tmp_path: Path) -> None:
    """A secret in the file of the configuration gives way to the environment's path, and that to a flag's value."""
    (tmp_path / "key").write_text("from the file named\n")
    config = write(tmp_path, '[server]\nadmin_key = "from the configuration"\n')
    environ = {"FOREWORD_SERVER_ADMIN_KEY_FILE": str(tmp_path / "key")}
    assert load_config(config, {}).server.admin_key == "from the configuration"
    assert load_config(config, environ).server.admin_key == "from the file named"
    flags = {"server": {"admin_key": "from the flag"}}
    assert load_config(config, environ, flags).server.admin_key == "from the flag"
    for text in ("from the file named", "from the flag"):
        assert text not in repr(load_config(config, environ, flags))


def test_an_empty_name_of_a_file_takes_no_secret_away(tmp_path: Path) -> None:
    """A variable `NAME_FILE` without a value, as a chart may set it, leaves the secret of a weaker place, and takes back a
    file's name there; `foreword config` finds the secret where it is."""
    (tmp_path / "key").write_text("from the file named\n")
    config = write(tmp_path, '[server]\nadmin_key = "from the configuration"\n')
    empty = {"FOREWORD_SERVER_ADMIN_KEY_FILE": ""}
    assert load_config(config, empty).server.admin_key == "from the configuration"
    [flag] = [flag for flag in server_flags() if (flag.section, flag.key) == ("server", "admin_key")]
    assert GivenConfig.read(config, empty, {}).source(flag) == f"[server] in {config}"
    config = write(tmp_path, f'[server]\nadmin_key_file = "{tmp_path}/key"\n')
    assert load_config(config, {}).server.admin_key == "from the file named"
    assert load_config(config, empty).server.admin_key is None


def test_secrets_are_not_printed() -> None:
    """A printed configuration or section shows no key, secret, salt or URL that may contain a password."""
    environ = {f"FOREWORD_{section}_{key}".upper(): text for (section, key), text in SECRETS.items()}
    config = load_config(environ=environ)
    for (section, key), text in SECRETS.items():
        assert text in (getattr(getattr(config, section), key), ",".join(getattr(getattr(config, section), key)))
    for one in (config, *(getattr(config, item.name) for item in dataclasses.fields(config))):
        assert "QuietPlease" not in f"{one} {one!r}"


def test_keys_named_like_secrets_are_secret() -> None:
    """A key of the configuration that is called a secret is among those that are not printed; a file's path is printed."""
    config = Config()
    for section in dataclasses.fields(config):
        for item in dataclasses.fields(getattr(config, section.name)):
            if re.search(r"(secret|key|keys|salt|password|token|urls)$", item.name):
                assert (section.name, item.name) in SECRETS and not item.repr


@pytest.mark.parametrize(("section", "key"), SECRETS)
@pytest.mark.parametrize("value", [{"QuietPlease": "x"}, ["QuietPlease"], b"QuietPlease"])
def test_an_error_does_not_repeat_a_secret(section: str, key: str, value: object) -> None:
    """A secret of the wrong type is an error that names the key and the type, and not what was given."""
    try:
        build(type(getattr(Config(), section)), section, {key: value})
    except ConfigError as error:
        assert "QuietPlease" not in error.message
        if not (isinstance(value, list) and key == "master_keys"):
            assert f"{section}.{key} must be" in error.message and f"not a {type(value).__name__}" in error.message
    else:
        assert isinstance(value, list) and key in ("api_keys", "urls")


KINDS = get_type_hints(Config)
GONE = {(name, key): said for name, kind in KINDS.items() for key, said in getattr(kind, "GONE", ())}
GONE |= {
    (name, one.name): one.metadata["gone"]
    for name, kind in KINDS.items()
    for one in dataclasses.fields(kind)
    if one not in keys_of(kind)
}


@pytest.mark.parametrize(("section", "key"), GONE)
def test_a_key_that_is_gone(section: str, key: str) -> None:
    """A key of an earlier version is an error that says its value and that it cannot be set, or which key took it over."""
    kind, said = KINDS[section], GONE[section, key]
    with pytest.raises(ConfigError, match=rf"^unknown configuration key {section}\.{key}: {re.escape(said)}$"):
        build(kind, section, {key: 1})
    known = {one.name for one in keys_of(kind)}
    assert key not in known
    assert re.fullmatch("it is .+ and cannot be set; remove it", said) or set(re.findall(r"\w+", said)) & known


def test_keys_that_are_constants_now(tmp_path: Path) -> None:
    """A constant is none of the flags, and neither a file nor a variable sets it. Keys of other sections have no such hint."""
    assert not {*GONE} & {(flag.section, flag.key) for flag in config_flags()}
    with pytest.raises(ConfigError, match=r"router\.tokenize_timeout: it is 1 s and cannot be set; remove it"):
        load_config(environ={"FOREWORD_ROUTER_TOKENIZE_TIMEOUT": "5"})
    with pytest.raises(ConfigError, match=r"server\.head_timeout: it is 10 s"):
        load_config(write(tmp_path, "[server]\nhead_timeout = 20\n"), environ={})
    with pytest.raises(ConfigError, match=r"unknown configuration key server\.session_ttl(?!: it is)"):
        build(ServerConfig, "server", {"session_ttl": 1})
