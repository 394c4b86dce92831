"""Every seeded bug of mutants_planner.py makes the tests of its part fail."""

import pytest
from mutants_planner import MUTANTS, survives


@pytest.mark.soak
@pytest.mark.parametrize(("part", "old", "new", "what"), MUTANTS, ids=[f"{m[0]}: {m[3]}" for m in MUTANTS])
def test_the_bug_is_caught(part, old, new, what, tmp_path):
    assert not survives(part, old, new, tmp_path), what
