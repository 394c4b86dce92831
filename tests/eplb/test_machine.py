"""The balancing machine under every order of events, and the times that it keeps."""

import numpy as np
import pytest
from arrangements import some_placement
from explorer import Setting, World, boundary, explore, make, successors

from afl.dist.eplb import events as ev
from afl.dist.eplb import machine
from afl.dist.eplb.values import Params, Placement
from afl.errors import CheckFailed

SWAP = Placement([[0, 1, 2, 3]], 2), Placement([[2, 1, 0, 3]], 2), 4
RING = Placement([[0, 1, 2, 3]], 2), Placement([[2, 3, 0, 1]], 2), 4
COPY = Placement([[0, 1, 2, 0]], 2), Placement([[0, 1, 2, 1]], 2), 3
LAYERS = Placement([[0, 1], [0, 1]], 2), Placement([[1, 0], [1, 0]], 2), 2
THREE = Placement([[0, 1, 2]], 3), Placement([[1, 2, 0]], 3), 3


@pytest.mark.parametrize(("places", "more"), [
    (SWAP, {}), (RING, {"steps": 5}), (COPY, {"steps": 5}), (LAYERS, {"steps": 4}),
    (RING, {"params": Params(staging=2, bytes_per_expert=0), "steps": 4}),
    (THREE, {"steps": 4, "failures": 0}),
    (RING, {"differ": True, "steps": 4}),
], ids=["swap", "ring", "copy", "layers", "rounds that share a step", "three ranks", "ranks are given different plans"])
def test_every_interleaving_keeps_placements_valid_and_ranks_together(places, more):
    worlds, phases = explore(Setting(*places, **more))
    assert worlds > 100
    assert phases >= {"Heat", "Planning"} and ("differ" in more or phases >= {"Moving", "Draining"})


@pytest.mark.soak
@pytest.mark.parametrize(("places", "steps", "each"), [
    (SWAP, 7, 2), (RING, 7, 2), (COPY, 7, 2), (LAYERS, 7, 2), (THREE, 5, 1),
], ids=["swap", "ring", "copy", "layers", "three ranks"])
def test_every_interleaving_of_more_steps_and_events(places, steps, each):
    worlds, _ = explore(Setting(*places, steps=steps, aborts=each, failures=each), most=3_000_000)
    assert worlds > 5_000


def drive(seed, steps):
    """A long random run on three ranks with two layers; the last world and the phases that it went through."""
    rng = np.random.default_rng(seed)
    a, b = some_placement(rng, 2, 5, 8, 3), some_placement(rng, 2, 5, 8, 3)
    params, cadence = Params(staging=seed % 3), machine.Cadence(2, 6, 3)
    setting = Setting(a, b, 5, params, steps, cadence, aborts=1 << 30, failures=1 << 30)
    w = World(tuple(machine.init(a, 5, cadence) for _ in range(3)), tuple(map(tuple, a.phys_to_log.tolist())))
    seen = set()
    while w.ranks[0].step < steps:
        options = list(successors(setting, w))
        weight = np.array([0.02 if any(x in n for x in ("gives up", "fails", "late")) else 1.0 for n, _ in options])
        w = options[rng.choice(len(options), p=weight / weight.sum())][1]()
        seen.add(type(w.ranks[0].phase).__name__)
    return w, seen


def test_long_random_runs_stay_whole_and_do_commit():
    commits, phases = [], set()
    for seed in range(8):
        w, seen = drive(seed, 300)
        commits.append(w.ranks[0].epoch)
        phases |= seen
    assert min(commits) > 5 and phases == {"Heat", "Planning", "Moving", "Draining"}


def alone(cadence=machine.Cadence(3, 2, 4)):  # noqa: B008
    return machine.init(Placement([[0, 1]], 1), 2, cadence)


def tick(s, load=True):
    counts = np.ones((1, 2), np.int64) if load else None
    return machine.advance(s, ev.Boundary(counts, (machine.report(s),)))


def test_a_plan_is_asked_for_after_the_heat_and_given_up_after_its_time():
    s, asked, stopped = alone(), [], []
    for _ in range(20):
        s, effects = tick(s)
        asked += [s.step for e in effects if isinstance(e, ev.StartPlan)]
        stopped += [s.step for e in effects if isinstance(e, ev.StopPlan)]
    assert asked == [3, 8, 13, 18] and stopped == [5, 10, 15, 20]
    assert s.epoch == 0


def test_loads_of_planning_and_moving_count_for_the_next_plan():
    s, windows = alone(), []
    for _ in range(9):
        s, effects = tick(s)
        windows += [e.window for e in effects if isinstance(e, ev.StartPlan)]
    assert [(w.start, w.end) for w in windows] == [(0, 3), (3, 8)]


def test_without_loads_no_plan_is_asked_for():
    s = alone()
    for _ in range(9):
        s, effects = tick(s, load=False)
        assert effects == ()


def test_a_late_plan_or_failure_changes_nothing():
    setting = Setting(*SWAP)
    states = [machine.init(setting.a, 4, machine.Cadence(1, 2, 2)) for _ in range(2)]
    plan = make(setting, setting.a, setting.b)
    for event in (ev.Planned(1, plan), ev.Failed(1, "died"), ev.RoundDone(1, 0)):
        assert machine.advance(states[0], event) == (states[0], ())
    s = states[0]
    for _ in range(3):                                     # asked for in step 1, given up in step 3
        s, _ = machine.advance(s, ev.Boundary(np.ones((1, 4), int), (machine.report(s),) * 2))
    assert isinstance(s.phase, ev.Heat) and s.ticket == 1
    assert machine.advance(s, ev.Planned(1, plan)) == (s, ())


def test_a_move_without_progress_is_given_up_and_the_next_plan_waits_for_its_copies():
    setting = Setting(*SWAP)
    s = machine.init(setting.a, 4, machine.Cadence(heat_steps=1, plan_steps=9, stall_steps=3))

    def tick(s):
        return machine.advance(s, ev.Boundary(np.ones((1, 4), int), (machine.report(s),)))

    s, _ = tick(s)
    s, _ = machine.advance(s, ev.Planned(1, make(setting, setting.a, setting.b)))
    s, begun = tick(s)
    assert [type(e) for e in begun] == [ev.StartRound] and isinstance(s.phase, ev.Moving)
    seen = []
    for _ in range(6):
        s, effects = tick(s)
        seen.append((type(s.phase).__name__, *(type(e).__name__ for e in effects)))
    assert seen == [("Moving",), ("Moving",), ("Draining", "DropStaged"), ("Draining",), ("Draining",), ("Draining",)]
    assert s.placement == setting.a and s.epoch == 0 and s.ticket == 1
    s, _ = machine.advance(s, ev.RoundDone(1, 0))
    s, effects = tick(s)
    assert isinstance(s.phase, ev.Heat) and effects == () and s.placement == setting.a


def test_rounds_that_end_out_of_order_count_when_the_earlier_ones_have_ended():
    setting = Setting(*RING, params=Params(staging=2, bytes_per_expert=0))
    s = machine.init(setting.a, 4, machine.Cadence(1, 9, 9))
    s, _ = machine.advance(s, ev.Boundary(np.ones((1, 4), int), (machine.report(s),)))
    s, _ = machine.advance(s, ev.Planned(1, make(setting, setting.a, setting.b)))
    s, begun = machine.advance(s, ev.Boundary(None, (machine.report(s),)))
    assert len(begun) == 2
    s, _ = machine.advance(s, ev.RoundDone(1, 1))
    assert machine.report(s).done == 0
    s, _ = machine.advance(s, ev.RoundDone(1, 0))
    assert machine.report(s).done == 2


def test_a_plan_without_rounds_moves_nothing():
    setting = Setting(*SWAP)
    s = machine.init(setting.a, 4, machine.Cadence(1, 9, 9))
    s, _ = machine.advance(s, ev.Boundary(np.ones((1, 4), int), (machine.report(s),)))
    s, _ = machine.advance(s, ev.Planned(1, make(setting, setting.a, setting.a)))
    s, effects = machine.advance(s, ev.Boundary(None, (machine.report(s),)))
    assert effects == () and isinstance(s.phase, ev.Heat) and s.epoch == 0


def test_ranks_that_differ_are_noticed():
    s = alone()
    for wrong in ({"step": 1}, {"epoch": 1}, {"ticket": 1}):
        with pytest.raises(CheckFailed, match="rank 1 is at"):
            machine.advance(s, ev.Boundary(None, (machine.report(s), machine.report(s)._replace(**wrong))))


def test_an_invalid_placement_is_refused_at_the_start():
    with pytest.raises(CheckFailed, match="on no rank"):
        machine.init(Placement([[0, 0]], 2), 2)


def test_the_explorer_sees_memory_that_is_overwritten_too_early():
    setting = Setting(*SWAP)
    w = World(tuple(machine.init(setting.a, 4, setting.cadence) for _ in range(2)), ((2, 1, 0, 3),))
    with pytest.raises(AssertionError, match="memory is not"):
        boundary(setting, w)
