"""Compiled loops on the threads of torch's own pool: a second pool would fight the first one for the cores.

torch's CPU build brings an OpenMP runtime.  Its `GOMP_parallel` runs one function on every thread of the pool; the
function takes numbered chunks of work from a shared counter until none is left, so no chunk waits for a slow thread.
Without that runtime the calling thread does all chunks, and so it does in a forked process: the threads of a pool stay
behind in the parent, and waiting for them would never end.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from afl.config import forked
from afl.machine_code import kept

Region = Callable[[int], None]


def gomp() -> int:
    """Address of GOMP_parallel in the runtime that torch has loaded; 0 when there is none or no pool to run on."""
    return 0 if forked() else _parallel()


@functools.cache
def _parallel() -> int:
    folder = Path(torch.__file__).parent / "lib"
    for name in (*map(str, sorted(folder.glob("libgomp*.so*"))), "libgomp.so.1"):
        try:
            found = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(found, ctypes.c_void_p).value or 0
    return 0


@functools.cache
def entry(region: Any) -> int:
    """Address of a compiled `void region(int64_t *work)`."""
    made: Any = kept(numba.cfunc, types.void(types.CPointer(types.int64)))(region)
    return made.address


@intrinsic
def take(typingctx, counter):
    """The next number of a counter in memory (its address), counting from 0; no number is given out twice."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        at = builder.inttoptr(args[0], word.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(word, 1), "monotonic")

    return types.int64(types.int64), build


@intrinsic
def fork(typingctx, parallel, region, work, threads):
    """Call region(work) on every one of `threads` threads; by the caller alone when `parallel` is 0 or one is asked.

    `work` is an int64 array and not its address: as an argument it lives until the call returns.
    """
    if not isinstance(work, types.Array):
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parallel, region, work, threads = args
        void, pointer, number = ir.VoidType(), ir.IntType(8).as_pointer(), ir.IntType(32)
        body = ir.FunctionType(void, [pointer])
        data = builder.bitcast(context.make_array(signature.args[2])(context, builder, work).data, pointer)
        alone = builder.or_(
            builder.icmp_signed("==", parallel, ir.Constant(parallel.type, 0)),
            builder.icmp_signed("<", threads, ir.Constant(threads.type, 2)),
        )
        with builder.if_else(alone) as (serial, team):
            with serial:
                builder.call(builder.inttoptr(region, body.as_pointer()), [data])
            with team:
                kind = ir.FunctionType(void, [body.as_pointer(), pointer, number, number])
                count = builder.trunc(threads, number)
                builder.call(builder.inttoptr(parallel, kind.as_pointer()),
                             [builder.inttoptr(region, body.as_pointer()), data, count, ir.Constant(number, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, work, types.int64), build


WORDS = 20                         # of `work`: counter, rows, rows per chunk, a real number, whole numbers from 4 on


@numba.njit
def rows_of_share(work: Any) -> Any:
    """The next rows [first, last) of a share that `spread` started, empty at the end; its numbers; its real number."""
    d = carray(work, (WORDS,))
    c = take(d[0])  # type: ignore[call-arg]
    return c * d[2], min(d[1], (c + 1) * d[2]), d[4:], d.view(np.float64)[3]


@kept(numba.njit, nogil=True)
def _spread(parallel, share, threads, rows, real, numbers):
    work = np.zeros(WORDS, np.int64)
    work[0], work[1], work[2] = work.ctypes.data + (WORDS - 1) * 8, rows, max(1, rows // (4 * threads))
    work.view(np.float64)[3] = real
    for i, x in enumerate(numbers):
        work[4 + i] = x
    fork(parallel, share, work, threads)  # type: ignore[call-arg]


def spread(share: Any, rows: int, real: float, *numbers: int) -> None:
    """Let all threads run `share`, which takes chunks of `rows` rows by `rows_of_share`."""
    _spread(gomp(), entry(share), torch.get_num_threads(), rows, real, numbers)
