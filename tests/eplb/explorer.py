"""Every interleaving of events on a few ranks, with memory that carries expert names instead of weights.

`explore` walks the graph of worlds.  In each it tries every event that could happen next: a plan reaches a rank (in
time, late, twice), a planner fails, a round's copies end on a rank, a rank gives up, a step ends everywhere.  What must
hold is checked as it happens; the first world where it does not is an AssertionError with the events that led there.
"""

from functools import cache, partial

import attrs
import numpy as np

from afl.dist.eplb import events as ev
from afl.dist.eplb import machine
from afl.dist.eplb.diff import settle
from afl.dist.eplb.plan import faults
from afl.dist.eplb.rounds import schedule
from afl.dist.eplb.values import Params, Placement, Plan, Topology


@attrs.frozen
class Setting:
    """Two placements between which the planner goes to and fro, and how much may happen."""

    a: Placement
    b: Placement
    experts: int
    params: Params = Params(staging=1)
    steps: int = 6
    cadence: machine.Cadence = machine.Cadence(heat_steps=1, plan_steps=2, stall_steps=2)
    aborts: int = 1
    failures: int = 1
    differ: bool = False                # whether ranks may be given different plans


@attrs.frozen
class World:
    """All ranks and what is on its way between them."""

    ranks: tuple[machine.State, ...]
    slots: tuple[tuple[int, ...], ...]                      # per layer: the name in every slot of every rank
    staged: frozenset[tuple[int, ...]] = frozenset()        # ticket, layer, rank, slot, name
    running: frozenset[tuple[int, int, int]] = frozenset()  # ticket, round, rank
    plans: tuple[Plan, ...] = ()                            # by ticket - 1
    given: frozenset[tuple[int, int]] = frozenset()         # ticket, rank
    aborts: int = 0
    failures: int = 0


def explore(setting, most=200_000):
    """Visit every world; the number of worlds, and the names of the phases that were seen at boundaries."""
    start = World(tuple(machine.init(setting.a, setting.experts, setting.cadence) for _ in range(setting.a.ranks)),
                  tuple(map(tuple, setting.a.phys_to_log.tolist())))
    seen, todo, phases = {key(start)}, [(start, ())], set()
    while todo:
        world, path = todo.pop()
        try:
            if not isinstance(world.ranks[0].phase, ev.Heat):
                calm(setting, world)
            for name, follow in successors(setting, world):
                new = follow()
                k = key(new)
                if k not in seen:
                    seen.add(k)
                    todo.append((new, (*path, name)))
                    phases.add(type(new.ranks[0].phase).__name__)
        except AssertionError as e:
            raise AssertionError(f"{e}\nafter {', '.join(path)}") from None
        assert len(seen) < most, "too many worlds; make the setting smaller"
    return len(seen), phases


def key(w):
    def one(s):
        phase = tuple(id(x) if isinstance(x, Plan) else x for x in s.phase if not isinstance(x, tuple))
        local = s.local.digest, s.local.finished, bool(s.local.failed), bool(s.local.abort)
        return s.step, s.epoch, s.ticket, type(s.phase), phase, local, s.placement.phys_to_log.tobytes()

    return tuple(map(one, w.ranks)), w.slots, w.staged, w.running, len(w.plans), w.given, w.aborts, w.failures


def successors(setting, w):
    """(name, function that makes the next world) of everything that can happen now."""
    tickets = range(max(1, len(w.plans) - 2), len(w.plans) + 1)
    for rank in range(len(w.ranks)):
        for ticket in tickets:
            late = "late " * (ticket < len(w.plans))
            if (ticket, rank) not in w.given:
                other = setting.differ and rank == 1
                yield f"{late}plan {ticket} reaches {rank}", partial(give, w, ticket, rank, other)
            if w.failures < setting.failures:
                event = ev.Failed(ticket, "died")
                yield f"{late}planner {ticket} fails on {rank}", partial(local, w, rank, event, failures=1)
        if w.aborts < setting.aborts:
            yield f"{rank} gives up", partial(local, w, rank, ev.Abort("link down"), aborts=1)
    for ticket, index, rank in sorted(w.running):
        yield f"round {index} of {ticket} ends on {rank}", partial(finish, w, ticket, index, rank)
    if w.ranks[0].step < setting.steps:
        yield "boundary", partial(boundary, setting, w)


def local(w, rank, event, **count):
    state, effects = machine.advance(w.ranks[rank], event)
    assert effects == (), "a local event must have no effect before the boundary"
    assert state.placement is w.ranks[rank].placement and state.phase is w.ranks[rank].phase
    states = (*w.ranks[:rank], state, *w.ranks[rank + 1:])
    return attrs.evolve(w, ranks=states, **{k: getattr(w, k) + n for k, n in count.items()})


def give(w, ticket, rank, other):
    plan = w.plans[ticket - 1]
    if other:
        plan = attrs.evolve(plan, rounds=plan.rounds[::-1])
    return attrs.evolve(local(w, rank, ev.Planned(ticket, plan)), given=w.given | {(ticket, rank)})


def finish(w, ticket, index, rank):
    """The copies of a round end on a rank: whatever it receives is what the source holds now."""
    staged, size = set(w.staged), w.ranks[0].placement.slots_per_rank
    for t in w.plans[ticket - 1].rounds[index]:
        source = w.slots[t.layer][t.src_rank * size + t.src_slot]
        if rank in (t.src_rank, t.dst_rank):
            assert source == t.expert, f"{t} reads a slot that holds {source} by now"
        if rank == t.dst_rank:
            staged.add((ticket, t.layer, rank, t.dst_slot, source))
    w = attrs.evolve(w, staged=frozenset(staged), running=w.running - {(ticket, index, rank)})
    return local(w, rank, ev.RoundDone(ticket, index))


def boundary(setting, w):
    load = np.ones((setting.a.layers, setting.experts), np.int64)
    reports = tuple(map(machine.report, w.ranks))
    made = [machine.advance(s, ev.Boundary(load, reports)) for s in w.ranks]
    w = attrs.evolve(w, ranks=tuple(s for s, _ in made))
    for rank, (_, effects) in enumerate(made):
        for e in effects:
            w = perform(setting, w, rank, e)
    one = w.ranks[0]
    for s in w.ranks:
        assert (s.step, s.epoch, s.ticket, s.placement) == (one.step, one.epoch, one.ticket, one.placement)
        assert type(s.phase) is type(one.phase), "ranks are in different phases"
        assert s.placement.check(setting.experts) == []
        assert s.window.steps == one.window.steps
    assert w.slots == tuple(map(tuple, one.placement.phys_to_log.tolist())), "memory is not what the placement says"
    if isinstance(one.phase, ev.Heat | ev.Planning):
        assert not w.running, "copies are under way though nothing is moving"
        w = attrs.evolve(w, staged=frozenset())
    return w


def perform(setting, w, rank, e):
    size = w.ranks[0].placement.slots_per_rank
    match e:
        case ev.StartPlan(ticket, window, placement):
            assert window.steps >= setting.cadence.heat_steps
            if ticket > len(w.plans):
                there = (np.sort(placement.by_rank) == np.sort(setting.b.by_rank)).all()
                wanted = setting.a if there else setting.b
                return attrs.evolve(w, plans=(*w.plans, make(setting, placement, wanted)))
            assert ticket == len(w.plans) and w.plans[-1] is not None
        case ev.StartRound(ticket, index, round):
            assert round == w.plans[ticket - 1].rounds[index]
            assert all(t == ticket for t, _, _ in w.running), "copies of an earlier plan are still under way"
            mine = {(ticket, index, r) for t in round for r in (t.src_rank, t.dst_rank)}
            w = attrs.evolve(w, running=w.running | {m for m in mine if m[2] == rank})
            held = {x[:4] for x in w.staged if x[2] == rank}
            coming = {(tk, t.layer, rank, t.dst_slot) for tk, i, r in w.running if r == rank
                      for t in w.plans[tk - 1].rounds[i] if t.dst_rank == rank}
            assert not setting.params.staging or len(held | coming) <= setting.params.staging, "staging slots overflow"
            if rank not in {m[2] for m in mine}:            # nothing to do here: ends at once
                return local(w, rank, ev.RoundDone(ticket, index))
        case ev.Commit(epoch, transfers, placement):
            assert epoch == w.ranks[rank].epoch and placement == w.ranks[rank].placement
            slots, staged = [list(row) for row in w.slots], set(w.staged)
            for t in transfers:
                if t.dst_rank == rank:
                    here = [x for x in staged if x[1:4] == (t.layer, rank, t.dst_slot)]
                    assert here, f"{t} commits before it has arrived"
                    assert [x[4] for x in here] == [t.expert] and here[0][0] == w.ranks[rank].ticket
                    slots[t.layer][rank * size + t.dst_slot] = t.expert
                    staged -= set(here)
            return attrs.evolve(w, slots=tuple(map(tuple, slots)), staged=frozenset(staged))
        case ev.DropStaged(ticket, why):
            assert why
            return attrs.evolve(w, staged=frozenset(x for x in w.staged if (x[0], x[2]) != (ticket, rank)))
        case ev.StopPlan(ticket, why):
            assert why and ticket == len(w.plans)
    return w


@cache
def make(setting, now, wanted):
    """The plan from a placement to another."""
    done = schedule(now, settle(now, wanted), Topology.regular(now.ranks), setting.params)
    nothing = np.ones(now.layers)
    plan = Plan(settle(now, wanted), done.rounds, nothing, nothing, 0, 0.0, 0.0, (), done.commits, done.starts)
    assert faults(plan, now, setting.experts) == []
    return plan


def calm(setting, w):
    """If from here on every copy ends, and no plan comes, the machine is back at heat before long."""
    for _ in range(12):
        for job in sorted(w.running):
            w = finish(w, *job)
        w = boundary(setting, w)
        if isinstance(w.ranks[0].phase, ev.Heat):
            return
    raise AssertionError(f"stuck in {w.ranks[0].phase}")
