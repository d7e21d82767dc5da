"""The `foreword` command. torch, transformers and the web frameworks are imported by the commands that need them."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import tempfile
import traceback
from importlib import import_module
from typing import Annotated, Final

import typer

from foreword import __version__
from foreword.errors import ConfigError, ForewordError

app = typer.Typer(
    name="foreword",
    help="A KV cache for LLM serving: offload, prefix-aware routing, named prefixes, and a small serving engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
    pretty_exceptions_enable=False,
)
# Modules of `foreword.cli` with commands, in the order of `--help`.
_MODULES: Final = (
    *("serve", "route", "top", "effective", "doctor", "prefix", "demo", "store", "simulate", "traffic"),
    *("conform", "audit", "explain", "keys", "bill"),
)
# Names of commands that their modules do not have.
_NAMES: Final = {"effective": "config"}
# Extras that install those that may be missing; the others are in `lab`.
_EXTRAS: Final = {
    "serve": "serve",
    "route": "route",
    "top": "top",
    "explain": "explain",
    "effective": "route",
    "doctor": "serve",
    "keys": "integrity",
}


def _register(module: str) -> None:
    """Add a module's commands, or in their place what says how to install them."""
    if importlib.util.find_spec(f"foreword.cli.{module}") is not None:
        import_module(f"foreword.cli.{module}").register(app)
        return
    extra = _EXTRAS.get(module, "lab")

    def missing() -> None:
        raise ConfigError(f"this command is not installed: pip install 'foreword[{extra}]'")

    missing.__doc__ = f"Not installed: pip install 'foreword[{extra}]'."
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(_NAMES.get(module, module), context_settings=settings, hidden=True)(missing)


for _module in _MODULES:
    _register(_module)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foreword {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. Exit status: 0, 2 for an error of the caller, 1 for any other error."""
    try:
        app()
    except ForewordError as error:
        print(f"foreword: {error.message}", file=sys.stderr)
        sys.exit(1 if error.fault == "server" else 2)
    except ModuleNotFoundError:
        raise  # foreword/__main__.py says which extra installs it
    except Exception as error:  # noqa: BLE001 - a bug: users get a sentence, and those who mend it the traceback
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            # The reader of the output has ended, such as `head`, or there is no room for it.
            sys.exit(1 if error.errno == errno.EPIPE else f"foreword: cannot write the output: {error.strerror}")
        with tempfile.NamedTemporaryFile("w", prefix="foreword-", suffix=".log", delete=False) as file:
            traceback.print_exc(file=file)
        sys.exit(
            f"foreword: this is a bug, please report it with the file {file.name}: "
            + " ".join(f"{type(error).__name__}: {error}".split())
        )


if __name__ == "__main__":
    main()
