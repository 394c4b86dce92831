"""Trees: what a node is, that nothing in them can be changed, and that a donated one says who took it."""

import copy
import pickle

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afl import tree
from afl.errors import AflError, UseAfterDonation
from afl.tree import evolve, static, struct


@struct
class Leafy:
    """Two children and a fact."""

    a: object
    b: object = None
    kind: str = static("plain")


trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=2),
    lambda sub: st.lists(sub, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=2), sub, max_size=3)
    | st.builds(Leafy, sub, sub, st.sampled_from(["plain", "fancy"])),
    max_leaves=12,
)


@given(trees)
def test_unflatten_is_the_inverse_of_flatten(t):
    leaves, d = tree.flatten(t)
    again = tree.unflatten(d, leaves)
    assert tree.flatten(again) == (leaves, d)
    assert hash(d) == hash(tree.flatten(again)[1])


@given(trees)
def test_paths_name_each_leaf_once_in_order(t):
    pairs = list(tree.paths(t))
    assert [x for _, x in pairs] == tree.leaves(t)


@given(trees)
def test_map_keeps_the_structure(t):
    doubled = tree.map(lambda x: (x, x)[0], t)
    assert tree.flatten(doubled)[1] == tree.flatten(t)[1]


def test_static_fields_belong_to_the_structure():
    a, b = Leafy(1, (2, None)), Leafy(1, (2, None), kind="fancy")
    assert tree.leaves(a) == tree.leaves(b) == [1, 2]
    assert tree.flatten(a)[1] != tree.flatten(b)[1]
    with pytest.raises(AflError, match="different structure"):
        tree.map(lambda x, y: x, a, b)


def test_map_takes_several_trees_of_one_structure():
    assert tree.map(lambda x, y: x + y, {"p": (1, 2)}, {"p": (10, 20)}) == {"p": (11, 22)}


def test_a_path_leads_to_its_leaf():
    t = {"x": (Leafy(1, Leafy(2, 3)), 4)}
    assert dict(tree.paths(t)) == {"x.0.a": 1, "x.0.b.a": 2, "x.0.b.b": 3, "x.1": 4}
    for path, leaf in tree.paths(t):
        assert tree.at(t, path) == leaf
    assert tree.at(t, "") is t


def test_a_list_inside_a_tree_is_refused():
    with pytest.raises(AflError, match="tuple"):
        tree.flatten((1, [2]))


def test_too_many_or_too_few_leaves_are_refused():
    d = tree.flatten((1, 2))[1]
    with pytest.raises(AflError, match="more leaves"):
        tree.unflatten(d, [1, 2, 3])
    with pytest.raises(AflError, match="fewer leaves"):
        tree.unflatten(d, [1])


def test_structs_are_frozen_and_compared_by_identity():
    a = Leafy(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        a.a = 2  # pyright: ignore
    with pytest.raises(AttributeError):
        a.other = 2  # pyright: ignore
    assert a != Leafy(1) and a == a and evolve(a, b=5).b == 5 and a.b is None


def test_a_field_that_does_not_exist_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'c'"):
        _ = Leafy(1).c  # pyright: ignore
    assert not hasattr(Leafy(1), "shape")


def test_structs_can_be_copied_and_pickled():
    t = Leafy(torch.arange(3), (1, Leafy(2)), kind="fancy")
    for other in (copy.copy(t), copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert tree.flatten(other)[1] == tree.flatten(t)[1] and torch.equal(other.a, t.a)


def test_a_long_tree_prints_short():
    text = repr(Leafy(tuple(torch.zeros(2, 3) for _ in range(50)), 7))
    assert len(text.splitlines()) <= 20 and "float32[2,3]" in text and "more" in text
    assert repr(Leafy(None)) == "Leafy()"


def test_size_counts_the_bytes_of_tensors():
    assert tree.size_of((torch.zeros(4), Leafy(torch.zeros(2, dtype=torch.int8)))) == 18


def test_every_struct_is_announced_to_watchers():
    seen: list[type] = []
    tree.watch_structs(seen.append)
    try:
        assert Leafy in seen

        @struct
        class Later:
            x: int

        assert seen[-1] is Later and tree.struct_fields(Later) == (("x",), ())
    finally:
        tree._WATCHERS.remove(seen.append)


# ---- donation -------------------------------------------------------------------------------------------------------


def test_a_donated_tree_names_the_call_that_took_it():
    inner = Leafy(1)
    t = Leafy(inner, (2, Leafy(3)))
    tree.poison(t, "step(...) at run.py:7")
    with pytest.raises(UseAfterDonation, match=r"Leafy\.a was read after step\(\.\.\.\) at run\.py:7 .*tree\.map"):
        _ = t.a
    with pytest.raises(UseAfterDonation):
        tree.leaves(t)
    with pytest.raises(UseAfterDonation):
        _ = inner.a
    assert repr(t) == "Leafy(donated)" and t.kind == "plain"


def test_donating_twice_or_a_shared_part_is_no_second_error():
    part = Leafy(1)
    t = Leafy(part, part)
    tree.poison(t, "here")
    tree.poison(t, "there")
    with pytest.raises(UseAfterDonation):
        _ = part.a


def test_a_copy_made_before_survives():
    t = Leafy(torch.ones(2), (torch.zeros(1),))
    kept = tree.map(torch.clone, t)
    tree.poison(t, "here")
    assert [x.tolist() for x in tree.leaves(kept)] == [[1, 1], [0]]


def test_structs_inside_dicts_are_emptied_too():
    inner = Leafy(1)
    tree.poison(Leafy({"x": inner}), "here")
    with pytest.raises(UseAfterDonation):
        _ = inner.a


def test_a_new_struct_is_not_blamed_for_an_old_donation():
    t = Leafy(1)
    tree.poison(t, "the first call")
    del t
    fresh = [Leafy(i) for i in range(50)]
    assert all(x.a == i for i, x in enumerate(fresh))
