"""Programs captured by `afl.ir.capture` against the same programs uncaptured, and seeded mistakes that must be caught.

Each mistake is one that a captured step can make silently on a device: the test shows that here it gives another answer
than the program, or that it is refused.
"""

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from afl import plugins, tree
from afl.device_fake import UPDATABLE, FakeDriver
from afl.errors import CaptureError
from afl.ir.capture import Arena, Captured, Pool, arena_bytes, capture, problems, update_plan
from afl.ops.kernels import fia
from afl.run.load import random_model
from afl.run.memory import Pool as CachePool
from afl.run.memory import tokens_of_block
from afl.run.pack import batch_of, fills_of, leaves_of, pad
from afl.run.programs import greedy_program

LAYERS, ROWS, WIDTH = 3, 4, 2
SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=LAYERS, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=256, tie_word_embeddings=False,
)
FIA = "npu::npu_fused_infer_attention_score"
LENS = [[5, 130, 77, 12], [6, 131], [9], [200, 1, 129]]


def batch(lens: list[int], token: int = 7) -> Any:
    r, kv = len(lens), np.array(lens, np.int32)
    blocks = 1 + np.arange(WIDTH * r, dtype=np.int32).reshape(r, WIDTH)
    slot = blocks[np.arange(r), (kv - 1) // 128] * 128 + (kv - 1) % 128
    return batch_of(token + np.arange(r, dtype=np.int32), kv - 1, slot, np.arange(r + 1, dtype=np.int32), kv, blocks,
                    np.arange(r, dtype=np.int32))


class Setting:
    """A model on one chip: its decode program of any bucket, a state full of old keys, and its captures."""

    def __init__(self, chip: str = "a3") -> None:
        self.model = random_model("LlamaForCausalLM", SIZES, seed=1, chip=chip, max_seqs=ROWS)
        self.cache = CachePool(1 + WIDTH * ROWS, tokens_of_block(self.model.caches, self.model.chip), 0, 256, "")
        self.jitted = greedy_program(self.model, self.cache)
        rng = torch.Generator().manual_seed(5)
        types = tree.leaves(self.model.state_types(self.cache.blocks, self.cache.block_tokens, ROWS))
        self.full = [torch.randn(t.shape, generator=rng).to(t.dtype) if t.dtype.is_floating_point
                     else torch.zeros(t.shape, dtype=t.dtype) for t in types]
        self.state = [x.clone() for x in self.full]

    def bound(self, rows: int = ROWS) -> Any:
        return self.jitted.program(tokens=rows, rows=rows, width=WIDTH)

    def capture(self, rows: int = ROWS, driver: Any = None, pool: Any = None, arena: Any = None) -> Captured:
        driver = driver or FakeDriver()
        bound = self.bound(rows)
        arena = arena or Arena(driver, arena_bytes(self.bound().program), 2)
        with torch.inference_mode():
            return capture(bound, self.state, arena, fills_of(1), driver, pool or Pool(driver.pool()))

    def reset(self) -> None:
        for x, y in zip(self.state, self.full, strict=True):
            x.copy_(y)

    def want(self, lens: list[int], rows: int = ROWS) -> torch.Tensor:
        """Logits of the real rows by the program itself."""
        self.reset()
        with torch.inference_mode():
            *_, logits = self.bound(rows)(*self.state, *leaves_of(pad(batch(lens), rows, rows, WIDTH)))
        return logits[: len(lens)].clone()

    def got(self, c: Captured, lens: list[int]) -> torch.Tensor:
        self.reset()
        return c.run(leaves_of(batch(lens)))[1][: len(lens)].clone()


@pytest.fixture(scope="module")
def s() -> Setting:
    plugins.load_ops()
    return Setting()


def test_replays_of_several_batches_equal_the_program_bit_for_bit(s):
    c = s.capture()
    for lens in (*LENS, LENS[0]):
        assert torch.equal(s.got(c, lens), s.want(lens))


def test_the_update_plan_is_the_attention_of_every_layer_in_the_order_of_the_equations(s):
    renewals, groups = update_plan(s.bound().program)
    assert [r.op for r in renewals] == [FIA] * LAYERS and len(groups) == 1
    at = [i for i, e in enumerate(s.bound().program.graph.eqns) if e.op.name == "paged_attention"]
    assert [r.equation for r in renewals] == at


# ---- forget one update, freeze one length -------------------------------------------------------------------------

@attrs.define(eq=False)
class Spoiled:
    """A graph whose updates are spoiled by `how` (the values of all records) before they are passed on."""

    graph: Any
    how: Any

    def update(self, values: Any) -> None:
        rows = list(values) * len(self.graph.records) if len(values) == 1 else list(values)
        self.graph.update(self.how([dict(v) for v in rows]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)


def spoiled(s: Setting, how: Any) -> Captured:
    c = s.capture()
    return attrs.evolve(c, graph=Spoiled(c.graph, how))


def without(rows: list[dict[str, Any]], layer: int) -> list[dict[str, Any]]:
    return [{} if i == layer else v for i, v in enumerate(rows)]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_forgetting_the_update_of_one_layer_is_seen(s, layer):
    assert not torch.equal(s.got(spoiled(s, lambda rows: without(rows, layer)), LENS[0]), s.want(LENS[0]))


def test_forgetting_all_updates_is_seen(s):
    c = attrs.evolve(s.capture(), renewals=())
    assert not torch.equal(s.got(c, LENS[0]), s.want(LENS[0]))


@pytest.mark.parametrize("row", range(3))
def test_freezing_the_length_of_one_row_changes_that_row_alone(s, row):
    def freeze(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for v in rows:
            v["actual_seq_lengths_kv"] = [1 if i == row else n for i, n in enumerate(v["actual_seq_lengths_kv"])]
        return rows

    got, want = s.got(spoiled(s, freeze), LENS[0]), s.want(LENS[0])
    assert [i for i in range(4) if not torch.equal(got[i], want[i])] == [row]


def test_lists_of_another_length_than_at_capture_are_refused(s):
    c = s.capture()
    longer = attrs.evolve(c.groups[0], values=lambda *a, **k: {key: [*v, 1] for key, v in fia.lengths(*a, **k).items()})
    with pytest.raises(CaptureError, match=r"takes lists of .* got .* lengths must follow from types alone"):
        attrs.evolve(c, groups=(longer,)).run(leaves_of(batch([3])))


def test_a_kernel_that_declares_no_update_for_its_host_operands_cannot_be_captured(s):
    bound = s.bound()
    kernels = tuple(attrs.evolve(k, update=None) if k.update else k for k in bound.program.plan.kernels)
    program = attrs.evolve(bound.program, plan=attrs.evolve(bound.program.plan, kernels=kernels))
    rows = problems(attrs.evolve(bound, program=program), s.state, FakeDriver())
    assert len(rows) == LAYERS and all("declares no update, so a replay would use those of the capture" in r
                                       for r in rows)


def test_a_driver_that_cannot_renew_an_argument_is_named_with_the_equations(s):
    table = {**UPDATABLE, FIA: {"actual_seq_lengths": 5}}
    with pytest.raises(CaptureError) as e:
        s.capture(driver=FakeDriver(table))
    assert str(e.value).count(f"would renew actual_seq_lengths_kv of {FIA}") == LAYERS


def test_a_recorded_call_that_no_kernel_declares_is_a_contradiction(s):
    class More(FakeDriver):
        def capture(self, fn: Any, pool: Any) -> Any:
            graph = super().capture(fn, pool)
            graph.records = (*graph.records, FIA)
            return graph

    with pytest.raises(CaptureError, match="the device recorded .* the kernels declare"):
        s.capture(driver=More())


# ---- reuse one buffer ---------------------------------------------------------------------------------------------

def test_two_inputs_in_one_buffer_are_seen(s):
    c = s.capture()
    names = [v.name for v in c.program.program.inputs[len(s.state) :]]
    a, b = names.index("position"), names.index("kv_len")
    places = tuple(attrs.evolve(p, hosts=c.places[a].hosts, device=c.places[a].device) if i == b else p
                   for i, p in enumerate(c.places))
    good = s.got(c, LENS[0])
    spoiled = s.got(attrs.evolve(c, places=places), LENS[0])
    assert torch.equal(good, s.want(LENS[0])) and not torch.equal(spoiled, good)


def test_one_host_buffer_for_two_inputs_never_happens_in_an_arena(s):
    c = s.capture()
    spans = sorted((p.device.data_ptr(), p.device.data_ptr() + p.device.nbytes) for p in c.places
                   if p.device is not None)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_state_that_shares_memory_with_another_state_is_refused(s):
    kept = s.state
    try:
        s.state = [kept[1], *kept[1:]]
        with pytest.raises(CaptureError, match=r"input .* shares memory with "):
            s.capture()
    finally:
        s.state = kept


def test_results_kept_over_a_run_of_another_graph_of_the_pool_are_garbage(s):
    driver = FakeDriver()
    pool, arena = Pool(driver.pool()), Arena(driver, arena_bytes(s.bound().program), 2)
    large, small = s.capture(4, driver, pool, arena), s.capture(2, driver, pool, arena)
    s.reset()
    token, logits = large.run(leaves_of(batch(LENS[0])))
    small.run(leaves_of(batch(LENS[1])))
    assert logits.isnan().all() and (token < 0).all()


# ---- the order ----------------------------------------------------------------------------------------------------

def test_capturing_a_larger_program_behind_a_smaller_one_is_refused(s):
    driver = FakeDriver()
    pool, arena = Pool(driver.pool()), Arena(driver, arena_bytes(s.bound().program), 2)
    s.capture(2, driver, pool, arena)
    with pytest.raises(CaptureError, match="the pool would grow; capture the largest program first"):
        s.capture(4, driver, pool, arena)


def test_largest_first_all_buckets_share_pool_and_arena_and_equal_their_programs(s):
    driver = FakeDriver()
    pool, arena = Pool(driver.pool()), Arena(driver, arena_bytes(s.bound().program), 2)
    made = {rows: s.capture(rows, driver, pool, arena) for rows in (4, 2, 1)}
    for lens in [[9], *LENS[:2], [9], LENS[1], LENS[0]]:
        rows = min(r for r in made if r >= len(lens))
        assert torch.equal(s.got(made[rows], lens), s.want(lens, rows))
    assert pool.graphs == 3 and pool.reserved == s.bound(4).program.plan.peak
    with pytest.raises(CaptureError, match="has 3 rows, the captured program takes 2"):
        made[2].run(leaves_of(batch([1, 2, 3])))
