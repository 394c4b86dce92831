"""Messages name the nearest thing; every error has an exit status and stays one of the family."""

import inspect
import pickle
import time

import pytest

from afl import errors
from afl.errors import AflError, BadInput, nearest, unknown, violations

FAMILY = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, AflError)]


@pytest.mark.parametrize("cls", FAMILY)
def test_an_error_is_documented_survives_pickling_and_has_a_status(cls):
    assert cls.__doc__
    again = pickle.loads(pickle.dumps(cls("what was wrong")))
    assert type(again) is cls and str(again) == "what was wrong"
    assert cls.exit_status == (2 if issubclass(cls, BadInput) else 1)


def test_the_nearest_name_comes_first():
    assert nearest("Temprature", ["top_p", "temperature", "temper"])[0] == "temperature"
    assert nearest("zzz", ["temperature"]) == []


def test_an_unknown_name_is_answered_with_the_list():
    assert unknown("chip", "cpuu", {"cpu": 1, "a2": 2}) == "unknown chip 'cpuu'; did you mean 'cpu'? Known: a2, cpu"
    assert unknown("chip", "x", []) == "unknown chip 'x'. Known: none"


def test_a_huge_name_is_cut_and_costs_no_time():
    start = time.process_time()
    assert unknown("chip", "cpu" * 1_000_000, ["cpu"]).startswith("unknown chip 'cpucpu")
    assert len(unknown("chip", "cpu" * 1_000_000, ["cpu"])) < 300
    assert nearest("cpu" * 1_000_000, ["cpu", "cpu" * 66]) == ["cpu" * 66] and time.process_time() - start < 1


def test_one_violation_is_a_sentence_and_several_are_a_list():
    assert violations("options", ["a is 1"]) == "a is 1"
    assert violations("options", (x for x in ("a", "b"))) == "options: 2 problems\n  - a\n  - b"
