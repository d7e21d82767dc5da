"""Lists what an installation brings along: names, versions and licences of all packages that Foreword needs, as CycloneDX JSON.

python packages/sbom.py [--extra vllm] [--licences]      those of the running environment; by default of the extra `all`

In an environment with `pip install 'foreword[EXTRA]'` and nothing else the list is that of users. `--licences` prints
a line per package instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from foreword import __version__

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_CLASSIFIER = "License :: "
_LONGEST = 80


@dataclass(frozen=True, order=True)
class Component:
    """A package of an installation. `licence`: an SPDX expression or a name; empty if its metadata has none."""

    name: str
    version: str
    licence: str

    def as_json(self) -> dict[str, Any]:
        """The component in CycloneDX."""
        found = {
            "type": "library",
            "name": self.name,
            "version": self.version,
            "purl": f"pkg:pypi/{self.name}@{self.version}",
        }
        return {**found, "licenses": [{"license": {"name": self.licence}}] if self.licence else []}


def components(extra: str) -> list[Component]:
    """Packages that Foreword with an extra needs here, directly and not. Raises PackageNotFoundError for what is not
    installed, and KeyError for an unknown extra."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    found: dict[str, Component] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(one), "") for one in project["dependencies"]]
    todo += [(Requirement(f"foreword[{extra}]"), "")]
    while todo:
        wanted, of = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": of}):
            continue
        name = canonicalize_name(wanted.name)
        for one in ("", *sorted(wanted.extras)):
            if (name, one) in seen:
                continue
            seen.add((name, one))
            if name == "foreword":
                todo += [(Requirement(line), "") for line in (project["optional-dependencies"][one] if one else ())]
                continue
            installed = metadata.distribution(name)
            found[name] = Component(name, installed.version, licence_of(installed.metadata))
            todo += [(Requirement(line), one) for line in installed.requires or ()]
    return sorted(found.values())


def licence_of(described: Any) -> str:
    """The licence that a package's metadata names: an SPDX expression, else its classifiers, else a short text."""
    if expression := described.get("License-Expression"):
        return str(expression)
    named = [one.rpartition(" :: ")[2] for one in described.get_all("Classifier") or () if one.startswith(_CLASSIFIER)]
    named = [one for one in named if one != "OSI Approved"]
    if named:
        return " AND ".join(sorted(named))
    text = (described.get("License") or "").strip().partition("\n")[0]
    return text if len(text) <= _LONGEST else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="all")
    parser.add_argument("--licences", action="store_true")
    given = parser.parse_args()
    try:
        found = components(given.extra)
    except metadata.PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed here: pip install 'foreword[{given.extra}]' first")
    if given.licences:
        for one in found:
            print(f"{one.name} {one.version}: {one.licence or 'not named'}")
        return
    about = {
        "type": "application",
        "name": "foreword",
        "version": __version__,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": about}}
    print(json.dumps({**bom, "components": [one.as_json() for one in found]}, indent=1))


if __name__ == "__main__":
    main()
