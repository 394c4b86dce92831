"""Local search on one layer: replace surplus replicas, exchange experts between two ranks (compiled loops).

The risk of a rank is mean + z * standard deviation of its load.  With the covariance of each rank's load with each
expert (`joint`) at hand, the risk after an exchange costs a few additions.  What the loops share, for one layer:

    slot int64 [ranks, slots per rank]      expert in each slot, -1 = hole
    fixed bool [ranks, slots per rank]      slots that must stay as they are
    home bool [ranks, experts]              where the experts were when the plan began: a move is a new place
    held bool [ranks, experts]              where they are
    count int64 [experts]                   replicas
    mean float64 [experts], cov float64 [experts, experts]      of an expert's whole load; cov is not read if z == 0
    part float64 [experts, experts]         cov between single replicas
    joint float64 [ranks, experts]          cov between a rank's load and one replica of an expert
    mu, var float64 [ranks]                 mean and variance of a rank's load
"""

import numpy as np


def tally(slot, count, mean, cov, z, part, joint, mu, var):
    """Write `part`, `joint`, `mu` and `var` from the slots."""
    ranks, size = slot.shape
    experts = len(mean)
    if z > 0:
        for e in range(experts):
            for f in range(experts):
                part[e, f] = cov[e, f] / (count[e] * count[f])
    for r in range(ranks):
        mu[r], var[r] = 0.0, 0.0
        if z > 0:
            joint[r, :] = 0.0
        for k in range(size):
            e = slot[r, k]
            if e >= 0:
                mu[r] += mean[e] / count[e]
                if z > 0:
                    for g in range(experts):
                        joint[r, g] += part[e, g]
        if z > 0:
            for k in range(size):
                if slot[r, k] >= 0:
                    var[r] += joint[r, slot[r, k]]


def put(slot, held, count, mean, z, part, joint, mu, var, r, k, f):
    """Write expert `f` into slot k of rank r and keep the sums true; `count` stays."""
    e = slot[r, k]
    slot[r, k] = f
    held[r, e], held[r, f] = False, True
    mu[r] += mean[f] / count[f] - mean[e] / count[e]
    if z > 0:
        var[r] += part[e, e] - 2.0 * joint[r, e] + 2.0 * (joint[r, f] - part[e, f]) + part[f, f]
        for g in range(len(mean)):
            joint[r, g] += part[f, g] - part[e, g]


def refill(slot, fixed, home, held, count, target, mean, cov, z, budget, part, joint, mu, var):
    """Overwrite replicas that `target` has no use for by those it misses: largest load first, on the least risky rank.

    int64 [experts] `count` becomes `target`, except where no rank can take a replica or `budget` moves are used up.
    Returns the moves made (an expert that comes back home takes one back).
    """
    ranks, size = slot.shape
    have = count.copy()
    count[:] = target
    tally(slot, count, mean, cov, z, part, joint, mu, var)
    order = np.argsort(-(mean / target), kind="mergesort")
    moves = 0
    for i in range(len(order)):
        f = order[i]
        while have[f] < target[f]:
            best, at, least = -1, -1, 0.0
            for r in range(ranks):
                if held[r, f]:
                    continue
                for k in range(size):
                    e = slot[r, k]
                    if e < 0 or fixed[r, k] or have[e] <= target[e]:
                        continue
                    if moves + (not home[r, f]) - (not home[r, e]) > budget:
                        continue
                    x = mu[r] + mean[f] / count[f] - mean[e] / count[e]
                    if z > 0:
                        v = var[r] + part[e, e] - 2.0 * joint[r, e] + 2.0 * (joint[r, f] - part[e, f]) + part[f, f]
                        x += z * np.sqrt(max(v, 0.0))
                    if best < 0 or x < least:
                        best, at, least = r, k, x
            if best < 0:
                break
            e = slot[best, at]
            moves += (not home[best, f]) - (not home[best, e])
            have[e] -= 1
            have[f] += 1
            put(slot, held, count, mean, z, part, joint, mu, var, best, at, f)
    count[:] = have
    tally(slot, count, mean, cov, z, part, joint, mu, var)
    return moves


def recount(slot, fixed, home, held, count, order, mean, z, price, left, risk, r, part, joint, mu, var):
    """The best replica to give up for one more of another expert, to lower the risk of rank `r`.

    Either an expert of r gets a replica elsewhere, or r gives up an expert that has others.  Returns (largest risk of
    the ranks that change + price of the move, rank, slot, expert to write there); rank -1 if r's risk would not fall.
    order: the experts, those first that win ties; left: moves that may still be made; price in the unit of risks.
    """
    ranks, size = slot.shape
    own = order[held[r][order]]                         # what another rank may take a replica of
    more, less = -1.0 / (count + 1), 1.0 / np.maximum(count - 1, 1)      # change of a holder's part of the load
    most = count / (count + 1.0)
    gain, drop, lose, rise = (np.empty(len(count)), np.empty(len(count)), np.empty(len(count)), np.empty(len(count)))
    for e in range(len(count)):                         # the same as loads: of those that get a replica, of its holders
        gain[e], drop[e] = most[e] * mean[e] / count[e], more[e] * mean[e] / count[e]
        lose[e], rise[e] = -mean[e] / count[e], less[e] * mean[e] / count[e]
    least, rank, at, expert = risk[r] * (1 - 1e-9), -1, -1, -1
    for q in range(ranks):
        for k in range(size):
            g = slot[q, k]
            if g < 0 or fixed[q, k] or count[g] < 2:
                continue
            able = order if q == r else own
            for i in range(len(able)):
                e = able[i]
                if held[q, e]:
                    continue
                new = (not home[q, e]) - (not home[q, g])
                if new > left:
                    continue
                worst = price * new
                for j in range(-2, ranks):              # r and q first: they are what mostly rules a change out
                    h = r if j == -2 else q if j == -1 else j
                    if not (held[h, e] or held[h, g]):
                        continue
                    if h == q:
                        m = mu[h] + gain[e] + lose[g]
                    else:
                        m = mu[h] + (drop[e] if held[h, e] else 0.0) + (rise[g] if held[h, g] else 0.0)
                    if z > 0:
                        x = most[e] if h == q else more[e] if held[h, e] else 0.0
                        y = -1.0 if h == q else less[g] if held[h, g] else 0.0
                        v = var[h] + 2.0 * (x * joint[h, e] + y * joint[h, g])
                        v += x * x * part[e, e] + y * y * part[g, g] + 2.0 * x * y * part[e, g]
                        m += z * np.sqrt(max(v, 0.0))
                    worst = max(worst, m + price * new)
                    if worst >= least:
                        break
                if worst < least:
                    least, rank, at, expert = worst, q, k, e
    return least, rank, at, expert


def exchange(slot, fixed, home, held, count, mean, cov, z, tol, reach, price, moves, budget, most, part, joint, mu,
             var):
    """Exchange experts between two ranks as long as the riskier of the two falls by what the moves cost.

    The riskiest rank goes first.  When it finds no partner, a replica changes its expert (`recount`); when that does
    not help either, the next rank tries, since its exchange may help the first one later.  A rank tries again only with
    ranks that changed.  price: what a move costs, in average loads of a rank; tol: ends when the peak risk is within
    tol of the average; reach: how far from the average to the peak a rank must be to try, 0 to 1; moves: made so far;
    most: number of steps.  In the end the best moment (peak risk + price of all moves) is restored.  Returns (peak risk
    over average load + price of moves, moves).
    """
    ranks, size = slot.shape
    risk = np.empty(ranks)
    average = 0.0
    for r in range(ranks):
        average += mu[r]
        risk[r] = mu[r] + z * np.sqrt(max(var[r], 0.0))
    average /= ranks
    changed, scanned, counted = np.ones(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    clock, n, best_n = 1, 0, 0
    best_value, best_moves = risk.max() / average + price * moves, moves
    best_slot, best_count = slot.copy(), count.copy()
    unit = mean / count
    order = np.argsort(-mean, kind="mergesort")         # ties go to the hotter expert, not to the smaller number
    refund = 2 * price * average                        # what an exchange that takes two moves back is worth
    while n < most and n - best_n <= 2 * ranks:
        if risk.max() <= average * (1.0 + tol):
            break
        r, floor = -1, average + reach * (risk.max() - average)
        for q in range(ranks):
            if scanned[q] < clock and risk[q] > floor and (r < 0 or risk[q] > risk[r]):
                r = q
        if r < 0:
            break
        least, with_rank, at, to = risk[r] - 1e-9 * average, -1, -1, -1
        for q in range(ranks):
            if q == r or risk[q] >= risk[r] or max(changed[q], changed[r]) <= scanned[r]:
                continue
            if 0.5 * (mu[r] + mu[q]) - refund > least:      # no exchange leaves both below their average
                continue
            for k in range(size):
                e = slot[r, k]
                if e < 0 or fixed[r, k] or held[q, e]:
                    continue
                for j in range(size):
                    f = slot[q, j]
                    if f < 0:
                        continue
                    d = unit[f] - unit[e]
                    x = max(mu[r] + d, mu[q] - d)
                    if x - refund >= least or fixed[q, j] or held[r, f]:
                        continue
                    new = (not home[q, e]) + (not home[r, f]) - (not home[r, e]) - (not home[q, f])
                    x += price * average * new
                    if x >= least or moves + new > budget:
                        continue
                    if z > 0:
                        w = part[e, e] + part[f, f] - 2.0 * part[e, f]
                        v = var[r] + w + 2.0 * (joint[r, f] - joint[r, e])
                        u = var[q] + w + 2.0 * (joint[q, e] - joint[q, f])
                        x = max(mu[r] + d + z * np.sqrt(max(v, 0.0)), mu[q] - d + z * np.sqrt(max(u, 0.0)))
                        x += price * average * new
                    if x < least:
                        least, with_rank, at, to = x, q, k, j
        if with_rank >= 0:
            q, e, f = with_rank, slot[r, at], slot[with_rank, to]
            moves += (not home[q, e]) + (not home[r, f]) - (not home[r, e]) - (not home[q, f])
            put(slot, held, count, mean, z, part, joint, mu, var, r, at, f)
            put(slot, held, count, mean, z, part, joint, mu, var, q, to, e)
            clock += 1
            changed[r] = changed[q] = clock
            risk[r] = mu[r] + z * np.sqrt(max(var[r], 0.0))
            risk[q] = mu[q] + z * np.sqrt(max(var[q], 0.0))
        else:
            q = -1
            if counted[r] < changed[r] and risk[r] >= risk.max():
                counted[r] = clock
                _, q, k, e = recount(slot, fixed, home, held, count, order, mean, z, price * average, budget - moves,
                                     risk, r, part, joint, mu, var)
            if q < 0:
                scanned[r] = clock
                continue
            g = slot[q, k]
            moves += (not home[q, e]) - (not home[q, g])
            slot[q, k] = e
            held[q, g], held[q, e] = False, True
            count[g] -= 1
            count[e] += 1
            unit[g], unit[e] = mean[g] / count[g], mean[e] / count[e]
            tally(slot, count, mean, cov, z, part, joint, mu, var)
            clock += 1
            for h in range(ranks):
                if held[h, e] or held[h, g] or h == q:
                    changed[h] = clock
                risk[h] = mu[h] + z * np.sqrt(max(var[h], 0.0))
        n += 1
        value = risk.max() / average + price * moves
        if value < best_value:
            best_value, best_moves, best_n = value, moves, n
            best_slot[:], best_count[:] = slot, count
    slot[:], count[:] = best_slot, best_count
    held[:] = False
    for r in range(ranks):
        for k in range(size):
            if slot[r, k] >= 0:
                held[r, slot[r, k]] = True
    tally(slot, count, mean, cov, z, part, joint, mu, var)
    return best_value, best_moves
