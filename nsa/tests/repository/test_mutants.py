"""The mutation check stays in step with the code: every planted bug still finds its place."""

import pytest

from nsa.tests.conftest import REPOSITORY
from scripts.mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_planted_bug_has_exactly_one_place(mutant):
    text = (REPOSITORY / "nsa" / mutant.file).read_text(encoding="utf-8")
    for old, new in mutant.edits:
        assert text.count(old) == 1, old
        assert old != new


def test_no_bug_is_planted_in_the_oracle():
    assert not any("reference" in mutant.file for mutant in MUTANTS)
