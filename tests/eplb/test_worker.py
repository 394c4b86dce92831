"""Planner processes that work, die, hang, lie or come too late; serving goes on in all cases."""

import sys
import time

import attrs
import numpy as np
import pytest
from arrangements import some_placement

from afl.dist.eplb import events as ev
from afl.dist.eplb import machine
from afl.dist.eplb.plan import faults, plan
from afl.dist.eplb.values import Links, LoadWindow, Params, Placement, Topology
from afl.dist.eplb.wire import pack, pack_job, pack_plan, unpack, unpack_job, unpack_plan
from afl.dist.eplb.worker import Planner
from afl.errors import BalanceError

RNG = np.random.default_rng(1)
NOW = some_placement(RNG, 3, 8, 12, 4)
LOAD = RNG.integers(0, 1000, (20, 3, 8)) * (1 + np.arange(8))
TOPOLOGY = Topology(4, [0, 0, 1, 1], [0, 0, 1, 1], Links(3e9, 2e9, 1e9))


def answers(planner, ticket=1, seconds=60.0):
    planner.ask(ev.StartPlan(ticket, LoadWindow.of(LOAD), NOW))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = planner.poll()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("no answer")


def bad_planner(code, seconds=20.0):
    return Planner(TOPOLOGY, seconds=seconds, command=(sys.executable, "-c", code))


def test_the_process_makes_the_plan_that_a_call_makes():
    (found,) = answers(Planner(TOPOLOGY, Params(staging=1), "greedy"))
    assert isinstance(found, ev.Planned), found
    made = plan(LoadWindow.of(LOAD), NOW, TOPOLOGY, Params(staging=1), "greedy")
    assert machine.digest(found.plan) == machine.digest(made)
    assert found.plan.placement == made.placement and found.plan.rounds == made.rounds != ()
    assert (found.plan.par_after == made.par_after).all() and found.plan.reasons == made.reasons


@pytest.mark.parametrize(("code", "said"), [
    ("import sys; sys.exit('no memory')", "status 1: no memory"),
    ("import os; os.kill(os.getpid(), 9)", "status -9: it said nothing"),
    ("print('hello')", "cannot be read"),
    ("print('{\"arrays\": {\"x\": [\"float64\", [1073741824]]}}')", "ends after the message"),
    ("import sys; sys.stdin.close(); print('{\"arrays\": {}}')", "cannot be read"),
])
def test_planners_that_die_or_talk_nonsense_have_failed(code, said):
    (found,) = answers(bad_planner(code))
    assert isinstance(found, ev.Failed) and said in found.why, found


def test_a_planner_that_hangs_is_ended():
    start = time.monotonic()
    (found,) = answers(bad_planner("import time; time.sleep(600)", seconds=0.5))
    assert isinstance(found, ev.Failed) and "ended" in found.why and time.monotonic() - start < 15


def test_asking_again_ends_the_job_before():
    planner = bad_planner("import time; time.sleep(600)")
    planner.ask(ev.StartPlan(1, LoadWindow.of(LOAD), NOW))
    planner.command = (sys.executable, "-c", "import sys; sys.exit('second')")
    seen = {}
    found = answers(planner, 2)
    while len(seen) < 2:
        seen |= {f.ticket: f.why for f in found + planner.poll()}
        time.sleep(0.01)
    assert "ended" in seen[1] and "second" in seen[2]
    planner.stop()


def test_a_plan_that_would_break_the_placement_is_no_plan():
    made = plan(LoadWindow.of(LOAD), NOW, TOPOLOGY, policy="greedy")
    wrong = attrs.evolve(made, rounds=made.rounds[::-1], commits=made.commits[::-1])
    code = f"import sys; sys.stdout.buffer.write({pack_plan(wrong)!r})"
    (found,) = answers(bad_planner(code))
    assert isinstance(found, ev.Failed) and "wrong" in found.why


def test_serving_goes_on_while_a_planner_hangs_and_after_it_died():
    planner = bad_planner("import time; time.sleep(600)", seconds=0.3)
    s, failed = machine.init(NOW, 8, machine.Cadence(2, 1 << 30, 9)), []
    end = time.monotonic() + 20
    while not failed and time.monotonic() < end:
        s, effects = machine.advance(s, ev.Boundary(LOAD[0], (machine.report(s),)))
        for e in effects:
            if isinstance(e, ev.StartPlan):
                planner.ask(e)
            if isinstance(e, ev.StopPlan):
                failed.append(e.why)
        for event in planner.poll():
            s, _ = machine.advance(s, event)
        time.sleep(0.005)
    assert failed and s.step > 5 and s.placement == NOW and s.epoch == 0
    planner.stop()


def test_a_working_planner_drives_the_machine_to_its_placement():
    planner = Planner(TOPOLOGY, Params(staging=2), "greedy")
    s = machine.init(NOW, 8, machine.Cadence(20, 1 << 30, 9))
    end, i = time.monotonic() + 60, 0
    plans = []
    while s.epoch == 0 or not isinstance(s.phase, ev.Heat):
        assert time.monotonic() < end
        s, effects = machine.advance(s, ev.Boundary(LOAD[i % 20], (machine.report(s),)))
        i += 1
        for e in effects:
            if isinstance(e, ev.StartPlan):
                planner.ask(e)
            if isinstance(e, ev.StartRound):
                s, _ = machine.advance(s, ev.RoundDone(e.ticket, e.index))
        for event in planner.poll():
            plans.append(event.plan)
            s, _ = machine.advance(s, event)
        time.sleep(0.001)
    assert s.placement == plans[0].placement != NOW


def test_jobs_and_plans_survive_the_wire():
    w, params = LoadWindow.of(LOAD, half_life=7.0), Params(pinned={(0, 1, 2)}, z=0.5)
    window, placement, topology, back, policy = unpack_job(pack_job(w, NOW, TOPOLOGY, params, "swift"))
    assert (placement, back, policy) == (NOW, params, "swift")
    assert (window.total == w.total).all() and (window.samples() == w.samples()).all()
    assert (window.ewma == w.ewma).all() and topology.bytes_per_s == TOPOLOGY.bytes_per_s
    made = plan(LoadWindow.of(LOAD), NOW, TOPOLOGY, policy="greedy")
    again = unpack_plan(pack_plan(made))
    assert machine.digest(again) == machine.digest(made) and faults(again, NOW, 8) == []


@pytest.mark.parametrize("data", [
    b"", b"\n", b"{}\n", b"[]\n", b'{"arrays": []}\n', b'{"arrays": {"a": ["object", [1]]}}\n',
    b'{"arrays": {"a": ["int32", [-1]]}}\n', b'{"arrays": {}}\nx', b"\xff\xfe\n",
    b'{"arrays": {"a": ["int32", [4294967296, 4294967296]]}}\n', b"[" * 100_000 + b"\n",
])
def test_messages_that_are_none_are_refused(data):
    with pytest.raises(BalanceError):
        unpack(data)
    with pytest.raises(BalanceError):
        unpack_plan(data)


def test_messages_of_plans_with_wrong_arrays_are_refused():
    one, none = np.array([[5, 0, 0, 0, 0, 0, 0]], np.int32), np.zeros((0, 2), np.int32)
    a = {"phys_to_log": NOW.phys_to_log, "transfers": one, "commits": none, "starts": np.zeros(1, np.int32),
         "before": np.ones(3), "after": np.ones(3)}
    head = {"ranks": 4, "rounds": 1, "bytes": 0, "seconds": 0, "gain_seconds": 0, "reasons": []}
    for wrong in ({"ranks": 0}, {"rounds": 2}, {}):
        with pytest.raises(BalanceError):
            unpack_plan(pack({**head, **wrong}, a))


def swapped(p):
    first = tuple(t._replace(src_slot=(t.src_slot + 1) % 3) for t in p.rounds[0])
    return attrs.evolve(p, rounds=(first, *p.rounds[1:]))


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda p: attrs.evolve(p, rounds=p.rounds[1:]), "rounds,"),
    (lambda p: attrs.evolve(p, placement=Placement(NOW.phys_to_log[:, :8], 4)), "another shape"),
    (lambda p: attrs.evolve(p, rounds=((p.rounds[0][0]._replace(expert=8),), *p.rounds[1:])), "out of range"),
    (lambda p: attrs.evolve(p, starts=(9, *p.starts[1:])), "out of order"),
    (lambda p: attrs.evolve(p, rounds=(p.rounds[0] + p.rounds[1], (), *p.rounds[2:])), "twice"),
    (swapped, "copies a slot that holds"),
    (lambda p: attrs.evolve(p, commits=(*p.commits[:-1], ())), "lead to"),
    (lambda p: attrs.evolve(p, starts=(0,) * len(p.starts)), "before round"),
])
def test_every_fault_of_a_plan_is_found(spoil, said):
    now = Placement([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]] * 3, 4)
    new = now.phys_to_log.copy()
    new[0] = [3, 4, 2, 0, 1, 5, 6, 7, 0, 1, 2, 3]
    new[1] = [3, 4, 2, 0, 1, 5, 6, 7, 0, 1, 2, 3]
    p = plan(LoadWindow.of(LOAD), now, TOPOLOGY, Params(staging=2), lambda *_: Placement(new, 4))
    assert faults(p, now, 8) == []
    bad = faults(spoil(p), now, 8)
    assert bad and any(said in b for b in bad), bad


def test_a_commit_that_makes_an_expert_disappear_for_a_while_is_found():
    now, new = Placement([[0, 1, 2, 3]], 2), Placement([[2, 1, 0, 3]], 2)
    p = plan(LoadWindow.of(LOAD[:, :1, :4]), now, Topology.regular(2), policy=lambda *_: new)
    assert p.commits == ((0,),) and faults(p, now, 4) == []
    a, b = p.rounds[0]
    early = attrs.evolve(p, rounds=((a,), (b,)), commits=((0,), (0,)), starts=(0, 1))
    assert any("after round 0" in x and "on no rank" in x for x in faults(early, now, 4))
