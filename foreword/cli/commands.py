"""Parts that the commands have in common: how `--help` lists options and examples, and checks of files that they write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from typer.core import TyperCommand

from foreword.errors import ConfigError


def check_file(option: str, path: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written where it should be. None: there is none."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(
            f"{option} {path}: {'it is a folder' if path.is_dir() else f'there is no folder {path.parent}'}"
        )


_ALL = "--help-all"


class HelpCommand(TyperCommand):
    """A command whose `--help` lists common options in groups, and examples; `--help-all` lists every option.

    Attributes:
        common: names of the options that `--help` shows; empty for all.
    """

    common: ClassVar[frozenset[str]] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if _ALL in args:
            ctx.meta[_ALL] = True
            print(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        parameters = self.get_params(ctx)
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is None or not (self._shows(parameter) or _ALL in ctx.meta):
                continue
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        if not all(map(self._shows, parameters)):
            count = sum(one.param_type_name == "option" for one in parameters)
            groups["Options"].append((_ALL, f"Show all {count} options, and exit."))
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def _shows(self, parameter: Any) -> bool:
        named = {one.lstrip("-") for one in parameter.opts} & self.common
        return not self.common or parameter.param_type_name == "argument" or parameter.name == "help" or bool(named)


def described(*examples: str, common: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of typer's `command`: examples below the help, and the options that `--help` shows (by default all)."""
    kind = type("Command", (HelpCommand,), {"common": frozenset(common)})
    lines = "\n".join(f"  foreword {one}" for one in examples)
    return {"cls": kind, "epilog": f"\b\nExample{'s' if len(examples) > 1 else ''}:\n{lines}"}
