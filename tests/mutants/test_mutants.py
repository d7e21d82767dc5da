"""The list of mutants belongs to the sources as they are: what moves is noticed at once, not when `make mutants` runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import FRAME, KEYS, MUTANTS, RECORDS, RESUME, Mutant
from run import Copy

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies(mutant: Mutant) -> None:
    """A mutant changes one place of a file to other code that can be read, and its tests are there."""
    source = (CHECKOUT / mutant.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutant.planted(source))) != ast.dump(ast.parse(source))
    assert mutant.tests and all((CHECKOUT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_mutants_have_names_of_their_own() -> None:
    """`make mutants` reports each by its name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("tests", [FRAME, KEYS, RECORDS, RESUME], ids=lambda tests: Path(tests[0]).stem)
def test_a_mutant_is_caught_in_the_copy(tests: tuple[str, ...], tmp_path: Path) -> None:
    """`make mutants` catches the first mutant of these tests, which so pass in the copy without it."""
    assert Copy(tmp_path, 600).caught(next(one for one in MUTANTS if one.tests == tests)) == "caught"
