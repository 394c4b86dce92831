"""A plan and the scheduler's tables become the model's `Batch`: one int32 buffer, made anew each step."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from afl.ir.capture import LAST
from afl.models.batch import Batch
from afl.sched import Plan, SchedState
from afl.sched.loops import compiled
from afl.types import HostInts


def pack(plan: Plan, s: SchedState) -> Batch:
    """The batch of a plan, unpadded: t = plan.tokens, r = len(plan.rows), w = widest block table.

    Token and slot follow from the tables: slot = block * block_tokens + offset; a token that the host does not know
    yet is -1 - row, the last one sampled there.
    """
    t, r = plan.tokens, len(plan.rows)
    out = np.empty(3 * t + 3 * r + 1, np.int32)
    log, first, known = s.tokens.columns
    size, *sizes = s.config.sizes.tolist()
    compiled(_fill)(plan.at, plan.start, plan.grant, plan.emit, plan.blocks[0], size, log, first, known, t, out)
    parts = torch.from_numpy(out).split_with_sizes((t, t, t, r, r, r + 1))
    token, position, slot, kv_len, row, q_start = parts
    hosts = HostInts.wrap(out[3 * t + 2 * r :]), HostInts.wrap(out[3 * t : 3 * t + r])
    more = [_tensor(_slots(plan, b, size)) for b, size in zip(plan.blocks[1:], sizes, strict=True)]
    blocks = tuple(torch.from_numpy(b) for b in plan.blocks)
    return Batch(token, position, (slot, *more), q_start, kv_len, blocks, row, *hosts)


def _slots(plan: Plan, blocks: np.ndarray, size: int) -> np.ndarray:
    """Slots of the tokens in a further cache group, int32 [t]."""
    rows = np.repeat(np.arange(len(plan.rows)), plan.grant)
    first = np.cumsum(plan.grant) - plan.grant
    position = np.arange(plan.tokens) - np.repeat(first - plan.start, plan.grant)
    return blocks[rows, position // size] * size + position % size


def _fill(rows, start, grant, emit, blocks, block_tokens, log, first, known, t, out):
    """Write token, position, slot [t each], kv_len, row [r each] and q_start [r+1] into `out`, one behind the other."""
    r, n, size = len(rows), 0, np.uint32(block_tokens)
    token, position, slot = out[:t], out[t : 2 * t], out[2 * t : 3 * t]
    kv_len, row, q_start = out[3 * t : 3 * t + r], out[3 * t + r : 3 * t + 2 * r], out[3 * t + 2 * r :]
    for i in range(r):
        at = rows[i]
        q_start[i], kv_len[i] = n, start[i] + grant[i]
        row[i] = at if emit[i] else -1
        for p in range(start[i], start[i] + grant[i]):
            token[n] = log[first[at] + p] if p < known[at] else -1 - at
            position[n] = p
            block = np.uint32(p) // size          # a 64-bit division costs three times as much
            slot[n] = blocks[i, block] * block_tokens + (p - block * size)
            n += 1
    q_start[r] = n


def leaves_of(b: Batch) -> tuple[Any, ...]:
    """The leaves of a batch in tree order, without walking it."""
    return (b.token, b.position, *b.slot, b.q_start, b.kv_len, *b.blocks, b.state_row, b.q_start_h, b.kv_len_h)


def batch_of(
    token: np.ndarray,
    position: np.ndarray,
    slot: np.ndarray,
    q_start: np.ndarray,
    kv_len: np.ndarray,
    blocks: np.ndarray,
    row: np.ndarray,
) -> Batch:
    """The arrays as int32 tensors that share their memory."""
    q_start, kv_len = _int32(q_start), _int32(kv_len)
    return Batch(
        _tensor(token),
        _tensor(position),
        (_tensor(slot),),
        torch.from_numpy(q_start),
        torch.from_numpy(kv_len),
        (_tensor(blocks),),
        _tensor(row),
        HostInts.wrap(q_start),
        HostInts.wrap(kv_len),
    )


def fills_of(groups: int) -> tuple[Any, ...]:
    """What the leaves of a batch with that many cache groups hold where it is padded, in tree order."""
    return (0, 0, *(-1,) * groups, LAST, 0, *(0,) * groups, -1, LAST, 0)


def pad(b: Batch, tokens: int, rows: int, width: int, fill: float = 0) -> Batch:
    """The batch padded to a bucket: extra tokens have slot -1 and token `fill`, extra rows no tokens and kv_len 0.

    What a captured graph of that bucket would be given; the real rows' results do not depend on `fill`.
    """
    t, r, w = len(b.token), len(b.kv_len), max(x.shape[1] for x in b.blocks)
    if tokens < t or rows < r or width < w:
        raise ValueError(f"bucket of {tokens} tokens, {rows} rows, {width} blocks is below the batch's {t}, {r}, {w}")
    blocks = tuple(_wider(x, rows, width) for x in b.blocks)
    q_start = np.concatenate([b.q_start_h.array, np.full(rows - r, b.q_start_h.array[-1], np.int32)])
    kv_len = np.concatenate([b.kv_len_h.array, np.zeros(rows - r, np.int32)])
    return Batch(
        _extend(b.token, tokens, int(fill)),
        _extend(b.position, tokens, 0),
        tuple(_extend(x, tokens, -1) for x in b.slot),
        torch.from_numpy(q_start.copy()),
        torch.from_numpy(kv_len.copy()),
        blocks,
        _extend(b.state_row, rows, -1),
        HostInts(q_start),
        HostInts(kv_len),
    )


def _wider(blocks: Tensor, rows: int, width: int) -> Tensor:
    out = torch.zeros(rows, width, dtype=torch.int32)
    out[: blocks.shape[0], : blocks.shape[1]] = blocks
    return out


def _extend(x: Tensor, n: int, value: int) -> Tensor:
    return torch.cat([x, torch.full((n - len(x),), value, dtype=x.dtype)])


def _int32(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a, dtype=np.int32)


def _tensor(a: np.ndarray) -> Tensor:
    return torch.from_numpy(_int32(a))
