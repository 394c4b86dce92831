"""Types of values: what they say of a tensor, and host vectors that nobody can change."""

import numpy as np
import pytest
import torch

from afl.types import DTYPES, SHORT, HostInts, HostIntsType, TensorType, type_of


def test_a_tensor_type_prints_short_and_counts_bytes():
    t = TensorType((4, 128, 8), torch.bfloat16)
    assert str(t) == "bf16[4,128,8]" and t.nbytes == 4 * 128 * 8 * 2
    assert str(TensorType((3,), torch.float16, "nz")) == "f16:nz[3]"
    assert str(TensorType((), torch.int32)) == "i32[]" and TensorType((), torch.int32).nbytes == 4
    assert TensorType((0, 5), torch.float32).nbytes == 0


def test_every_named_dtype_has_a_short_form():
    assert set(DTYPES.values()) == set(SHORT) and len(set(SHORT.values())) == len(SHORT)


def test_types_are_equal_by_value_and_hash_alike():
    a, b = TensorType((2, 3), torch.int8), TensorType((2, 3), torch.int8)
    assert a == b and hash(a) == hash(b) and a != TensorType((2, 3), torch.int8, "nz")
    assert len({a, b, HostIntsType(2), HostIntsType(2)}) == 2


def test_type_of_a_value():
    assert type_of(torch.zeros(2, 5, dtype=torch.int64)) == TensorType((2, 5), torch.int64)
    assert type_of(HostInts([1, 2, 3])) == HostIntsType(3)
    assert type_of(HostIntsType(3)) == HostIntsType(3)
    with pytest.raises(TypeError, match="list"):
        type_of([1, 2])


def test_a_host_vector_is_a_copy_that_cannot_be_written():
    buffer = np.array([3, 1, 2], np.int64)
    h = HostInts(buffer)
    buffer[0] = 9
    assert h.list == [3, 1, 2] and h.array.dtype == np.int32 and len(h) == 3
    with pytest.raises(ValueError, match="read-only"):
        h.array[0] = 5
    assert h.list is h.list and h.tensor is h.tensor, "converted once"
    assert h.tensor.dtype == torch.int32 and repr(h) == "HostInts([3, 1, 2])"


def test_a_host_vector_has_one_dimension():
    with pytest.raises(ValueError, match="vector"):
        HostInts([[1, 2]])
    assert HostInts([]).list == []


def test_wrapping_keeps_the_array():
    a = np.arange(3, dtype=np.int32)
    assert HostInts.wrap(a).array is a
