"""The contract of a captured graph, on operators of these tests: what was captured is what is replayed."""

import gc
from typing import Any

import pytest
import torch

from afl.device import HostDriver
from afl.device_fake import FakeDriver
from afl.errors import CaptureError
from afl.ir.capture import still

LIBRARY = torch.library.Library("aflcapture", "FRAGMENT")
LIBRARY.define("weigh(Tensor x, int[] lens, *, int[] kv) -> Tensor")
LIBRARY.impl("weigh", lambda x, lens, *, kv: x * sum(lens) + torch.tensor(kv), "CPU")
OPS = {"aflcapture::weigh": {"lens": 1, "kv": 2}}
weigh = torch.ops.aflcapture.weigh.default


def two_layers(x: torch.Tensor, lens: list[int], kv: list[int]) -> Any:
    return lambda: (weigh(weigh(x, lens, kv=kv) + 1.0, lens, kv=kv),)


def want(x: torch.Tensor, first: Any, second: Any) -> torch.Tensor:
    """The same by hand; each argument is (lens, kv) of one layer."""
    y = x * sum(first[0]) + torch.tensor(first[1]) + 1.0
    return y * sum(second[0]) + torch.tensor(second[1])


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(OPS)


OLD, NEW = ([1, 2], [10, 20]), ([3, 4], [50, 60])


def test_lengths_that_are_not_renewed_are_those_of_the_capture(driver):
    x = torch.tensor([1.0, 2.0])
    lens, kv = [list(v) for v in OLD]
    g = driver.capture(two_layers(x, lens, kv), driver.pool())
    assert g.records == ("aflcapture::weigh",) * 2
    lens[:], kv[:] = NEW                                # the caller's lists change, the graph's do not
    g.replay()
    assert torch.equal(g.outputs[0], want(x, OLD, OLD))


@pytest.mark.parametrize("forgotten", [0, 1])
def test_forgetting_one_update_leaves_that_layer_stale_and_no_other(driver, forgotten):
    x = torch.tensor([1.0, 2.0])
    g = driver.capture(two_layers(x, *OLD), driver.pool())
    new = {"lens": NEW[0], "kv": NEW[1]}
    g.update([{} if i == forgotten else new for i in range(2)])
    g.replay()
    rows = [OLD if i == forgotten else NEW for i in range(2)]
    assert torch.equal(g.outputs[0], want(x, *rows)) and not torch.equal(g.outputs[0], want(x, NEW, NEW))
    g.update([new])                                     # one mapping is for all records
    g.replay()
    assert torch.equal(g.outputs[0], want(x, NEW, NEW))


def test_freezing_one_list_leaves_that_list_stale_in_every_layer(driver):
    x = torch.tensor([1.0, 2.0])
    g = driver.capture(two_layers(x, *OLD), driver.pool())
    g.update([{"lens": NEW[0]}])
    g.replay()
    half = NEW[0], OLD[1]
    assert torch.equal(g.outputs[0], want(x, half, half)) and not torch.equal(g.outputs[0], want(x, NEW, NEW))


def test_updates_in_another_order_than_the_calls_give_another_answer(driver):
    x = torch.tensor([1.0, 2.0])
    g = driver.capture(two_layers(x, *OLD), driver.pool())
    a, b = {"lens": [3, 4], "kv": [50, 60]}, {"lens": [5, 6], "kv": [7, 8]}
    g.update([b, a])
    g.replay()
    swapped = g.outputs[0].clone()
    g.update([a, b])
    g.replay()
    assert torch.equal(g.outputs[0], want(x, NEW, ([5, 6], [7, 8]))) and not torch.equal(swapped, g.outputs[0])


def test_another_number_of_updates_than_of_records_is_refused(driver):
    g = driver.capture(two_layers(torch.ones(2), *OLD), driver.pool())
    for n in (0, 3):
        with pytest.raises(CaptureError, match=f"{n} updates for 2 recorded calls"):
            g.update([{}] * n)


def test_an_input_is_read_where_it_lay_and_a_branch_stays_as_it_was(driver):
    x, flag = torch.tensor([1.0, 2.0]), [True]
    box = [x]
    g = driver.capture(lambda: (box[0] * 2 if flag[0] else box[0] * 3,), driver.pool())
    box[0], flag[0] = torch.tensor([7.0, 7.0]), False
    g.replay()
    assert g.outputs[0].tolist() == [2.0, 4.0], "a new tensor or branch is not seen"
    x.copy_(torch.tensor([5.0, 6.0]))
    g.replay()
    assert g.outputs[0].tolist() == [10.0, 12.0], "new contents are"


def test_state_is_overwritten_in_place_at_every_replay(driver):
    state = torch.zeros(3)
    g = driver.capture(lambda: (state.add_(1),), driver.pool())
    before = state.clone()
    for _ in range(3):
        g.replay()
    assert g.outputs[0].data_ptr() == state.data_ptr() and torch.equal(state, before + 3)


def test_results_are_garbage_after_a_replay_of_another_graph_of_the_pool(driver):
    x, pool = torch.tensor([1.0, 2.0]), driver.pool()
    a = driver.capture(lambda: (x * 2, (x > 0).int()), pool)
    b = driver.capture(lambda: (x * 3,), pool)
    a.replay()
    kept = a.outputs
    assert kept[0].tolist() == [2.0, 4.0]
    b.replay()
    assert kept[0].isnan().all() and (kept[1] < 0).all(), "whoever keeps a result without copying it sees garbage"
    other = driver.capture(lambda: (x * 5,), driver.pool())
    other.replay()
    assert b.outputs[0].tolist() == [3.0, 6.0], "another pool is other memory"


@pytest.mark.parametrize(("fn", "why"), [
    (lambda x: (x * x.sum().item(),), "reads a value of the device"),
    (lambda x: (x.nonzero(),), "size of its result depends on values"),
    (lambda x: (x[x > 1],), "size of its result depends on values"),
    (lambda x: (torch.masked_select(x, x > 1),), "size of its result depends on values"),
    (lambda x: (x if bool(x[0] > 0) else -x,), "reads a value of the device"),
])
def test_what_a_device_cannot_capture_is_named(driver, fn, why):
    with pytest.raises(CaptureError, match=rf"aten::\w+ cannot be captured: .*{why}"):
        driver.capture(lambda: fn(torch.tensor([1.0, 2.0])), driver.pool())


def test_gathering_by_integers_is_captured(driver):
    x, at = torch.arange(4.0), torch.tensor([1, 3])
    g = driver.capture(lambda: (x[at],), driver.pool())
    at.copy_(torch.tensor([0, 2]))
    g.replay()
    assert g.outputs[0].tolist() == [0.0, 2.0]


def test_a_capture_runs_without_garbage_collection_and_leaves_the_collector_as_it_was():
    assert gc.isenabled()
    with pytest.raises(KeyError), still():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_host_has_everything_done_and_captures_nothing():
    host = HostDriver()
    with host.stream():
        event = host.event()
        event.record()
    event.synchronize()
    host.synchronize()
    assert host.memory().total > 0 and host.updatable("npu::npu_fused_infer_attention_score") == frozenset()
    assert host.device_bytes(5).tolist() == host.host_bytes(5).tolist() == [0] * 5
    for refused in (host.pool, lambda: host.capture(lambda: (), None)):
        with pytest.raises(CaptureError, match="captures no graphs"):
            refused()
