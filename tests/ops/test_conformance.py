"""Every kernel of every op on every chip that can run it, against the op's reference.  New ones need no new test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conformance import Combination, all_chips, all_ops, ambiguous, combinations, conforms
from rng import Rng
from torch import Tensor

from afl.chip import F
from afl.errors import AmbiguousKernel
from afl.ir import kernel as kernels
from afl.ir.kernel import kernel
from afl.ir.op import Op
from afl.ops.act import swiglu
from afl.ops.attention import write_kv

TABLE = combinations()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny calls: on a shared machine a pool of threads spends its time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("it", TABLE, ids=str)
def test_kernel_conforms(it: Combination):
    conforms(it)


@pytest.mark.parametrize("op", all_ops(), ids=lambda o: o.name)
def test_an_op_is_documented_and_has_cases(op: Op):
    assert op.__doc__, "say in one sentence what it returns"
    assert op.examples(Rng()), "an op without cases is not tested; write @op.cases"


def test_every_kernel_is_run_by_some_case_on_some_chip():
    run = {(it.op.name, it.kernel.name) for it in TABLE}
    idle = [repr(k) for op in all_ops() for k in op.kernels if (op.name, k.name) not in run]
    assert not idle, f"no case of their op reaches {idle}"


def test_every_needed_feature_is_had_by_a_chip():
    for op in all_ops():
        for k in op.kernels:
            assert any(k.needs <= c.features for c in all_chips()), f"{k}: no chip has {sorted(k.needs)}"


@pytest.mark.parametrize("op", all_ops(), ids=lambda o: o.name)
def test_choice_of_kernel_is_unambiguous(op: Op):
    for chip in all_chips():
        ambiguous(op, chip)


# ---- the suite itself: wrong kernels are found without a test of their own ------------------------------------------


@contextmanager
def registered(op: Op, fn: Callable[..., Any], **facts: Any) -> Iterator[None]:
    """A kernel that exists inside the block only."""
    before = list(op.kernels)
    kernel(op, needs={F.TORCH_CPU}, name="wrong", priority=9, **facts)(fn)
    try:
        yield
    finally:
        op.kernels[:] = before
        kernels._MEMO.clear()


def right(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def wrong_by_a_little(x: Tensor) -> Tensor:
    return right(x) * 1.001


def wrong_type(x: Tensor) -> Tensor:
    return right(x).double()


def wrong_changes_operand(x: Tensor) -> Tensor:
    y = right(x)
    x.zero_()
    return y


def wrong_returns_a_part_of_its_operand(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2].copy_(right(x))


def wrong_assumes_dense_memory(x: Tensor) -> Tensor:
    size = [1]
    for n in reversed(x.shape[1:]):
        size.insert(0, size[0] * n)
    return right(x.as_strided(x.shape, size))


def wrong_looks_at_batch_mates(x: Tensor) -> Tensor:
    scale = x.float().abs().amax().clamp(min=1e-6)
    return right((x.float() / scale * scale).to(x.dtype))


WRONG = {
    wrong_by_a_little: "differ, first at", wrong_type: "f64", wrong_changes_operand: "changed its operand",
    wrong_returns_a_part_of_its_operand: "operand", wrong_assumes_dense_memory: "row_strided",
    wrong_looks_at_batch_mates: "row 0 depends",
}


@pytest.mark.parametrize("fn", WRONG)
def test_a_wrong_kernel_fails_the_suite_without_a_new_test(fn: Callable[..., Any]):
    with registered(swiglu, fn):
        rows = [it for it in combinations(swiglu) if it.kernel.name == "wrong"]
        assert rows, "the new kernel is not in the table"
        with pytest.raises(AssertionError, match=WRONG[fn]):
            for it in rows:
                conforms(it)


def test_a_right_kernel_passes_it():
    with registered(swiglu, right):
        for it in combinations(swiglu):
            conforms(it)


def test_a_kernel_that_claims_to_be_in_place_must_be():
    def fn(k_cache, v_cache, k, v, slot):
        return write_kv.reference(k_cache, v_cache, k, v, slot)

    with registered(write_kv, fn, inplace={0: "k_cache", 1: "v_cache"}):
        with pytest.raises(AssertionError, match="in place"):
            for it in combinations(write_kv):
                conforms(it)


def test_two_kernels_that_nothing_orders_are_an_error():
    def fn(x):
        return right(x)

    with registered(swiglu, right):
        kernel(swiglu, needs={F.TORCH_CPU}, name="other", priority=9)(fn)
        with pytest.raises(AmbiguousKernel, match="priority"):
            for chip in all_chips():
                ambiguous(swiglu, chip)
