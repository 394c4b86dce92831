"""Plain loops over arrays, compiled by numba on first use; the same bits come out uncompiled (NUMBA_DISABLE_JIT=1).

No fastmath, no parallel loops, ties broken by the lowest index: the result depends on the operands only.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType

import numpy as np


@cache
def compiled(loop: Callable) -> Callable:
    """The machine code of `loop` and of the functions of its own module that it calls; kept on disk."""
    import numba

    called = {n: loop.__globals__.get(n) for n in loop.__code__.co_names}
    own = {n: compiled(f) for n, f in called.items() if isinstance(f, FunctionType) and f.__module__ == loop.__module__}
    bound = FunctionType(loop.__code__, loop.__globals__ | own, loop.__name__, loop.__defaults__)
    return numba.njit(cache=True)(bound)


def replicate(weight, extra, most):
    """int64 [extra + 1, experts]: replicas of each expert after 0, 1, ... extra ones went to the hottest replica.

    No expert gets more than `most`.  Each row minimises the hottest replica for its number of replicas.
    """
    n = len(weight)
    out = np.ones((extra + 1, n), np.int64)
    for i in range(1, extra + 1):
        best, at = -1.0, -1
        for e in range(n):
            out[i, e] = out[i - 1, e]
            if out[i, e] < most and weight[e] / out[i, e] > best:
                best, at = weight[e] / out[i, e], e
        if at >= 0:
            out[i, at] += 1
    return out


def place_free(held, free, e):
    """Make room for expert `e` on a rank that lacks it although every rank with free slots holds it; the rank or -1.

    A rank q that lacks e hands one of its experts to a rank r with a free slot, and takes e instead: the first pair
    (r, q) and the first expert of q that r lacks.  held: bool [ranks, experts], changed; free: int64 [ranks], changed.
    """
    ranks, experts = held.shape
    for r in range(ranks):
        if free[r] > 0:
            for q in range(ranks):
                if not held[q, e]:
                    for f in range(experts):
                        if held[q, f] and not held[r, f]:
                            held[q, f] = False
                            held[r, f] = True
                            held[q, e] = True
                            free[r] -= 1
                            return q
    return -1


def pack(order, weight, count, size, held):
    """Give each replica, experts in `order`, to the lightest rank with a free slot that lacks the expert.

    weight float64 [experts]: load of one replica; size int64 [ranks]: slots; held bool [ranks, experts]: result.
    Returns whether every replica found a place.
    """
    ranks = len(size)
    load = np.zeros(ranks)
    free = size.copy()
    for i in range(len(order)):
        e = order[i]
        for _ in range(count[e]):
            best = -1
            for r in range(ranks):
                if free[r] > 0 and not held[r, e] and (best < 0 or load[r] < load[best]):
                    best = r
            if best >= 0:
                held[best, e] = True
                free[best] -= 1
                load[best] += weight[e]
            elif place_free(held, free, e) < 0:
                return False
            else:
                for r in range(ranks):
                    load[r] = 0.0
                    for f in range(len(weight)):
                        if held[r, f]:
                            load[r] += weight[f]
    return True


def covariance(x, out):
    """Unbiased covariance of the columns of x [samples, experts]; zero for fewer than two samples."""
    m, n = x.shape
    mean = np.zeros(n)
    for t in range(m):
        for e in range(n):
            mean[e] += x[t, e]
    for e in range(n):
        mean[e] /= max(m, 1)
    out[:] = 0.0
    if m < 2:
        return
    d = np.empty(n)
    for t in range(m):
        for e in range(n):
            d[e] = x[t, e] - mean[e]
        for e in range(n):
            a = d[e]
            for f in range(n):
                out[e, f] += a * d[f]
    for e in range(n):
        for f in range(n):
            out[e, f] /= m - 1


def pack_risk(order, mean, cov, count, z, size, held):
    """`pack` by risk: each replica goes to the rank whose mean + z * standard deviation is lowest with it.

    mean float64 [experts] and cov float64 [experts, experts] are those of an expert's whole load.
    """
    ranks, experts = held.shape
    mu, var = np.zeros(ranks), np.zeros(ranks)
    free = size.copy()
    slot = np.full((ranks, size.max()), -1, np.int64)
    n = np.zeros(ranks, np.int64)
    for i in range(len(order)):
        e = order[i]
        for _ in range(count[e]):
            best, least, its_var = -1, 0.0, 0.0
            for r in range(ranks):
                if free[r] > 0 and not held[r, e]:
                    both = 0.0
                    for k in range(n[r]):
                        f = slot[r, k]
                        both += cov[e, f] / count[f]
                    v = var[r] + (cov[e, e] / count[e] + 2.0 * both) / count[e]
                    risk = mu[r] + mean[e] / count[e] + z * np.sqrt(max(v, 0.0))
                    if best < 0 or risk < least:
                        best, least, its_var = r, risk, v
            if best >= 0:
                held[best, e] = True
                free[best] -= 1
                slot[best, n[best]] = e
                n[best] += 1
                mu[best] += mean[e] / count[e]
                var[best] = its_var
            elif place_free(held, free, e) < 0:
                return False
            else:                                   # two ranks changed behind the sums: count all anew
                for r in range(ranks):
                    n[r], mu[r], var[r] = 0, 0.0, 0.0
                    for f in range(experts):
                        if held[r, f]:
                            slot[r, n[r]] = f
                            n[r] += 1
                            mu[r] += mean[f] / count[f]
                    for a in range(n[r]):
                        for b in range(n[r]):
                            f, g = slot[r, a], slot[r, b]
                            var[r] += cov[f, g] / (count[f] * count[g])
    return True


def peaks(x, count, held):
    """float64 [samples]: (peak of the ranks * ranks + 0.01) / (sum + 0.01) of each sample; x [samples, experts]."""
    m, experts = x.shape
    ranks = held.shape[0]
    out = np.empty(m)
    unit = np.empty(experts)
    rank, expert = np.nonzero(held)
    load = np.empty(ranks)
    for t in range(m):
        whole = 0.0
        for e in range(experts):
            whole += x[t, e]
            unit[e] = x[t, e] / count[e]
        load[:] = 0.0
        for i in range(len(rank)):
            load[rank[i]] += unit[expert[i]]
        out[t] = (load.max() * ranks + 0.01) / (whole + 0.01)
    return out
