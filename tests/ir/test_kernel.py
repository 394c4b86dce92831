"""Choosing kernels: declared needs, order, explanations; no chip is asked for its name."""

import pytest
import torch
from ir_toys import BARE, PLAIN, TOY, private, t32
from torch import Tensor

from afl.chip import Chip
from afl.errors import AflError, NoKernel
from afl.ir.kernel import choose, explain, kernel
from afl.ir.op import FLOAT, T
from afl.types import TensorType


@private
def toy_norm(x: T[Tensor, "*b d", FLOAT], g: T[Tensor, "d", "x"], *, eps: float) -> T[Tensor, "*b d", "x"]:
    """Some norm."""
    return x * g


def few_rows(x, g, *, eps):
    """at most eight rows"""
    return x.shape[0] <= 8


def body(x, g, *, eps):
    return x * g


kernel(toy_norm, needs={"toy"}, name="general")(body)
kernel(toy_norm, needs={"toy"}, name="half", dtypes=frozenset({torch.float16}), priority=5)(body)
kernel(toy_norm, needs={"toy"}, name="small", when=few_rows, priority=2)(body)
kernel(toy_norm, needs={"toy"}, name="packed", fmt={"g": "nz"}, priority=9)(body)
kernel(toy_norm, needs={"cube"}, name="cube", priority=9)(body)

EPS = (("eps", 1e-6),)


def test_the_highest_priority_that_accepts_the_types_wins():
    assert choose(toy_norm, (t32(9, 4), t32(4)), EPS, TOY).name == "general"
    assert choose(toy_norm, (t32(8, 4), t32(4)), EPS, TOY).name == "small"
    f16 = TensorType((9, 4), torch.float16), TensorType((4,), torch.float16)
    assert choose(toy_norm, f16, EPS, TOY).name == "half"
    packed = t32(9, 4), TensorType((4,), torch.float32, "nz")
    assert choose(toy_norm, packed, EPS, TOY).name == "packed"


def test_prefer_orders_before_priority():
    chip = Chip("picky", features=frozenset({"toy"}), prefer={"toy_norm": ("general",)})
    assert choose(toy_norm, (t32(8, 4), t32(4)), EPS, chip).name == "general"


def test_the_reference_runs_only_where_the_chip_allows_it():
    assert choose(toy_norm, (t32(9, 4), t32(4)), EPS, PLAIN).name == "reference"
    with pytest.raises(NoKernel, match="needs toy"):
        choose(toy_norm, (t32(9, 4), t32(4)), EPS, Chip("empty"))


def test_a_choice_explains_every_rejection(golden):
    shown = explain(toy_norm, (t32(9, 4), t32(4)), EPS, TOY), explain(toy_norm, (t32(9, 4), t32(4)), EPS, PLAIN)
    with pytest.raises(NoKernel) as e:
        choose(toy_norm, (TensorType((9, 4), torch.float16, "nz"), t32(4)), EPS, BARE)
    golden("ir_explain", "\n\n".join([*map(str, shown), str(e.value)]))


def test_a_kernel_has_the_exact_signature_of_its_op():
    with pytest.raises(AflError, match="exact signature"):
        kernel(toy_norm, name="short")(lambda x, g: x)
    with pytest.raises(AflError, match="names operands that the op lacks"):
        kernel(toy_norm, name="lost", inplace={0: "y"})(body)
    with pytest.raises(AflError, match="registered twice"):
        kernel(toy_norm, name="general")(body)


def test_a_new_kernel_is_seen_by_choices_made_before():
    @private
    def toy_late(x: T[Tensor, "*b", FLOAT]) -> T[Tensor, "*b", "x"]:
        return x.clone()

    assert choose(toy_late, (t32(2),), (), TOY).name == "reference"
    kernel(toy_late, needs={"toy"}, name="late")(lambda x: x.clone())
    assert choose(toy_late, (t32(2),), (), TOY).name == "late"
