"""Versioned containers behave like plain copies, whichever version is read or extended."""

import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.versioned import TokenLog, VArray, VDict

# Each operation acts on a version chosen among all made so far, so histories branch.
picks = st.integers(0, 1 << 16)


@given(st.lists(st.tuples(picks, st.integers(0, 5), st.one_of(st.none(), st.integers(0, 3))), max_size=40), picks)
def test_dict_versions_equal_plain_copies(ops, last):
    made = [(VDict({0: 9}), {0: 9})]
    for pick, key, value in ops:
        v, d = made[pick % len(made)]
        d = dict(d)
        if value is None:
            v, _ = v.delete(key), d.pop(key, None)
        else:
            v, d[key] = v.set(key, value), value
        made.append((v, d))
        assert len(v) == len(d)
    v, d = made[last % len(made)]
    assert pickle.loads(pickle.dumps(v)) == v
    for v, d in made:
        assert dict(v) == d and len(v) == len(d)
        assert all(v.get(k, -1) == d.get(k, -1) and (k in v) == (k in d) for k in range(6))


@given(st.lists(st.tuples(picks, st.sets(st.integers(0, 6), max_size=4), st.integers(0, 99)), max_size=40))
def test_array_versions_equal_plain_copies(ops):
    made = [(VArray(np.arange(7)), np.arange(7))]
    for pick, index, value in ops:
        v, a = made[pick % len(made)]
        a, index = a.copy(), sorted(index)
        values = np.arange(len(index)) + value
        a[index] = values
        made.append((v.set(index, values), a))
    for v, a in made + made[::-1]:
        assert (v.array == a).all()


def test_array_versions_keep_slices_and_are_read_only():
    a = VArray(np.zeros((2, 3), int))
    b = a.set((slice(0, 2), 1), 5)
    c = a.set(np.ix_([1], [0, 2]), 7)
    assert b.array.tolist() == [[0, 5, 0], [0, 5, 0]]
    assert c.array.tolist() == [[0, 0, 0], [7, 0, 7]]
    assert not a.array.any()
    assert not a.array.flags.writeable


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.tuples(picks, st.sampled_from("apppc"), st.sets(st.integers(0, 4), min_size=1), st.integers(0, 60)),
                max_size=40))
def test_token_log_versions_equal_plain_copies(ops):
    made = [(TokenLog(5), [[] for _ in range(5)])]
    for pick, op, rows, n in ops:
        log, plain = made[pick % len(made)]
        plain, rows = [list(p) for p in plain], sorted(rows)
        if op == "p":                                     # twenty appends to the same rows
            for t in range(20):
                log = log.append(rows, np.arange(len(rows)) + n + t)
                for i, row in enumerate(rows):
                    plain[row].append(i + n + t)
        elif op == "a":
            log, plain[rows[0]] = log.put(rows[0], range(n)), list(range(n))
        else:
            log = log.clear(rows)
            for row in rows:
                plain[row] = []
        made.append((log, plain))
    for log, plain in made:
        assert [log[r].tolist() for r in range(5)] == plain
        assert log.lengths.tolist() == [len(p) for p in plain]
        for row in range(5):
            at = np.arange(len(plain[row]))
            assert log.at(np.full(len(at), row), at).tolist() == plain[row]


def test_a_version_that_follows_the_newest_does_not_copy():
    log = TokenLog(3).put(0, range(40)).put(1, range(40))
    buffer = log._shared
    for t in range(10):
        log = log.append([0, 1], [t, t])
    assert log._shared is buffer
    fork = log.append([0], [1])
    assert log.append([1], [5])._shared is buffer         # row 1 was not forked
    assert log.append([0], [2])._shared is not buffer and fork[0][-1] == 1
