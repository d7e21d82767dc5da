"""The list of what an installation brings along, with licences (packages/sbom.py)."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import foreword

PROGRAM = Path(__file__).parents[1] / "packages" / "sbom.py"
# Licences of what a user may pass on without giving away sources of his own.
_PERMISSIVE = re.compile(
    r"Apache|MIT|BSD|ISC|PSF|Python Software Foundation|MPL|Mozilla|Zlib|CC0|CNRI|BSL|LLVM", re.IGNORECASE
)


def test_every_package_has_a_licence() -> None:
    """Each package that Foreword with all extras needs, also indirectly, names a licence, and none asks for the sources of who
    uses it. The cache alone needs its two libraries."""
    components = runpy.run_path(str(PROGRAM))["components"]
    found = {one.name: one.licence for one in components("all")}
    assert {"torch", "msgspec", "obstore", "redis", "cryptography", "regex"} <= {*found}, (
        "regex is a need of transformers"
    )
    assert not [name for name, licence in found.items() if not licence]
    for name, licence in found.items():
        for part in re.split(r" (?:AND|OR|WITH) ", licence):
            assert _PERMISSIVE.search(part) or part == "0BSD", (name, licence)
        assert not re.search(r"\b(A|L)?GPL", licence), (name, licence)
    assert {"xxhash", "msgspec"} == {one.name for one in components("s3")} - {"obstore", "typing-extensions"}


def test_the_list_is_cyclonedx() -> None:
    """The program prints a CycloneDX document of this version, with a package URL for each component."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--extra", "redis"], capture_output=True, text=True, check=True
    )
    bom = json.loads(done.stdout)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.5")
    assert bom["metadata"]["component"]["version"] == foreword.__version__
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" for one in bom["components"])
    assert "hiredis" in {one["name"] for one in bom["components"]}
