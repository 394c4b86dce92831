"""The annotation language of ops: unification of dimensions and dtypes, and what its errors say."""

import pytest
import torch
from ir_toys import private, t32
from torch import Tensor

from afl.errors import AflError, TypeRuleError
from afl.ir.op import ANY, FLOAT, FLOAT32, INT32, T, op, registered
from afl.types import HostInts, HostIntsType, TensorType


@private
def toy_lang(
    x: T[Tensor, "*b h e", FLOAT],
    g: T[Tensor, "e", "x"],
    starts: T[Tensor, "r+1", INT32],
    wide: T[Tensor, "2*h", FLOAT32],
    lens: T[HostInts, "r"],
    four: T[Tensor, "4 _", ANY] | None,
    *,
    eps: float,
    mode: str = "a",
) -> tuple[T[Tensor, "*b e h", "x"], T[Tensor, "r 4", INT32]]:
    """Everything that the language can say."""


GOOD = (
    TensorType((5, 3, 14), torch.bfloat16), TensorType((14,), torch.bfloat16), TensorType((8,), torch.int32), t32(6),
    HostIntsType(7), None,
)
PARAMS = (("eps", 1e-6), ("mode", "a"))


def test_dimensions_unify_left_to_right_over_all_operands():
    x, y = toy_lang.infer(GOOD, PARAMS)
    assert x == TensorType((5, 14, 3), torch.bfloat16) and y == TensorType((7, 4), torch.int32)
    assert toy_lang.dims(GOOD) == {"*b": (5,), "h": 3, "e": 14, "r": 7}


def test_a_prefix_may_be_empty_or_long():
    for prefix in ((), (2, 5)):
        types = (TensorType((*prefix, 3, 14), torch.bfloat16), *GOOD[1:])
        assert toy_lang.infer(types, PARAMS)[0].shape == (*prefix, 14, 3)


@pytest.mark.parametrize("place, bad, text", [
    (0, TensorType((14,), torch.float32), "needs at least 2"),
    (0, TensorType((3, 14), torch.int32), "is not one of"),
    (1, TensorType((13,), torch.bfloat16), "dimension e is 13, earlier 14"),
    (1, TensorType((14,), torch.float32), "differs from that of 'x'"),
    (1, TensorType((14, 1), torch.bfloat16), r"has 2 dimensions, needs 1: \[e\]"),
    (3, t32(7), "must be a multiple of 2"),
    (3, t32(8), "dimension h is 4, earlier 3"),
    (4, HostIntsType(8), "dimension r is 8, earlier 7"),
    (4, TensorType((7,), torch.int32), "must be a host vector"),
    (2, HostIntsType(8), "must be a tensor"),
    (5, TensorType((3, 2), torch.int8), "a dimension is 3, must be 4"),
    (2, None, "is missing"),
])
def test_what_does_not_fit_is_named_with_declared_and_given_types(place, bad, text):
    types = (*GOOD[:place], bad, *GOOD[place + 1 :])
    with pytest.raises(TypeRuleError, match=text) as e:
        toy_lang.infer(types, PARAMS)
    assert toy_lang.operands[place].name in str(e.value)
    assert "declared  toy_lang" in str(e.value) and "got       x:" in str(e.value)


def test_binding_fills_defaults_and_refuses_unknown_or_missing_parameters():
    five = (None,) * 5
    assert toy_lang.bind(five, {"eps": 1.0}) == ((None,) * 6, (("eps", 1.0), ("mode", "a")))
    with pytest.raises(TypeRuleError, match="no parameter"):
        toy_lang.bind(five, {"eps": 1.0, "epsilon": 1.0})
    with pytest.raises(TypeRuleError, match="needs parameter"):
        toy_lang.bind(five, {})
    with pytest.raises(TypeRuleError, match="needs operand 'lens'"):
        toy_lang.bind((None,) * 4, {"eps": 1.0})
    with pytest.raises(TypeRuleError, match="takes 6 operands, got 7"):
        toy_lang.bind((None,) * 7, {"eps": 1.0})


def test_parameters_must_be_hashable():
    with pytest.raises(TypeRuleError, match="must be hashable, got eps="):
        toy_lang.infer(GOOD, (("eps", [1]), ("mode", "a")))


def test_annotations_that_say_nothing_are_refused_when_the_op_is_declared():
    with pytest.raises(AflError, match="annotate it as"):
        @private
        def toy_bare(x: Tensor) -> Tensor:
            return x


def test_a_name_is_declared_once():
    registered()
    from afl.ops import basic

    with pytest.raises(AflError, match="declared twice"):
        op(basic.add.reference)
