"""I07: an engine that has work and does none turns red, with the oldest request and the reason; on a virtual clock."""

from sched_fakes import Run

from afl.sched import Grammar, Paused, Request, Resumed, SchedConfig
from afl.sched.health import Watch
from afl.sched.policies import get

CONFIG = SchedConfig(2, 16, 64, 32, 4)


def test_i07_a_result_that_does_not_come_names_its_plan_and_the_oldest_request():
    run, watch = Run(CONFIG, depth=2), Watch(10.0)
    run.submit(Request("old", range(20), 5), Request("young", [1], 5))
    watch = watch.see(run.state, 100.0)
    assert watch.health(run.state, 109.0).ok
    run.submit(Request("third", [1], 5))                      # arrivals and plans alone are no progress
    watch = watch.see(run.state, 108.0)
    found = watch.health(run.state, 110.5)
    assert (found.ok, found.request, found.idle) == (False, "old", 10.5) and "the result of plan 1" in found.reason
    assert str(found).startswith("no progress for 10.5 s; the oldest request is old: the result of plan 1, with 16 tok")
    run.step()                                                # the result came
    watch = watch.see(run.state, 111.0)
    assert watch.health(run.state, 112.0).ok and not watch.health(run.state, 121.0).ok


def test_i07_a_queue_that_stands_still_tells_the_gates_reason():
    """A gate that never opens, as a bug or a peer that is gone would make it."""
    from afl.sched import Peers

    run, watch = Run(CONFIG, policy=get("balance")), Watch(5.0)
    run.step(Peers(0, (2, 2), (1, 1), (5, 5)))
    run.submit(Request("a", [1], 2), Request("b", [1], 2))
    watch = watch.see(run.state, 0.0)
    for now in range(1, 8):
        run.step()
        watch = watch.see(run.state, float(now))
    found = watch.health(run.state, 7.0)
    assert (found.ok, found.request) == (False, "a") and "the others let it reach 2" in found.reason


def test_i07_waiting_for_others_is_no_standstill():
    run, watch = Run(CONFIG), Watch(5.0)
    run.submit(Request("g", [1, 2], 3, grammar=True), Request("s", [4], 1, session=True))
    for _ in range(4):
        run.step()
    watch = watch.see(run.state, 0.0)
    assert watch.see(run.state, 50.0).health(run.state, 99.0).ok and run.state.busy
    run.step(Paused("keep"))
    run.step(Grammar("g"))
    assert watch.see(run.state, 60.0).health(run.state, 99.0).ok
    run.step(Resumed())
    watch = watch.see(run.state, 61.0)
    assert watch.health(run.state, 65.0).ok and not watch.health(run.state, 67.0).ok
    run.step()
    assert watch.see(run.state, 67.0).health(run.state, 68.0).ok
