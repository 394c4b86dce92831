"""A plan and the scheduler's tables become the model's `Batch`: all in numpy, every array made anew each step."""

import numpy as np
import torch
from torch import Tensor

from afl.models.batch import Batch
from afl.sched import Plan, SchedState, tokens_for
from afl.types import HostInts


def pack(plan: Plan, s: SchedState) -> Batch:
    """The batch of a plan, unpadded: t = plan.tokens, r = len(plan.rows), w = widest block table."""
    s_tokens = s.config.block_tokens
    start, grant, r = plan.start, plan.grant, len(plan.rows)
    token = tokens_for(s, plan)
    q_start = np.zeros(r + 1, np.int32)
    np.cumsum(grant, out=q_start[1:])
    if len(token) == r:
        position = start.astype(np.int32)
        slot = plan.blocks[np.arange(r), start // s_tokens] * s_tokens + start % s_tokens
    else:
        within = np.arange(len(token), dtype=np.int32) - np.repeat(q_start[:-1], grant)
        position = np.repeat(start, grant) + within
        slot = plan.blocks[np.repeat(np.arange(r), grant), position // s_tokens] * s_tokens + position % s_tokens
    kv_len = start + grant
    row = np.where(plan.emit, plan.rows, -1)
    return batch_of(token, position, slot, q_start, kv_len, plan.blocks, row)


def batch_of(
    token: np.ndarray, position: np.ndarray, slot: np.ndarray, q_start: np.ndarray, kv_len: np.ndarray,
    blocks: np.ndarray, row: np.ndarray,
) -> Batch:
    """The arrays as int32 tensors that share their memory."""
    q_start, kv_len = _int32(q_start), _int32(kv_len)
    return Batch(
        _tensor(token), _tensor(position), (_tensor(slot),), torch.from_numpy(q_start), torch.from_numpy(kv_len),
        (_tensor(blocks),), _tensor(row), HostInts.wrap(q_start), HostInts.wrap(kv_len),
    )


def pad(b: Batch, tokens: int, rows: int, width: int, fill: float = 0) -> Batch:
    """The batch padded to a bucket: extra tokens have slot -1 and token `fill`, extra rows no tokens and kv_len 0.

    What a captured graph of that bucket would be given; the real rows' results do not depend on `fill`.
    """
    t, r, w = len(b.token), len(b.kv_len), b.blocks[0].shape[1]
    if tokens < t or rows < r or width < w:
        raise ValueError(f"bucket of {tokens} tokens, {rows} rows, {width} blocks is below the batch's {t}, {r}, {w}")
    blocks = torch.zeros(rows, width, dtype=torch.int32)
    blocks[:r, :w] = b.blocks[0]
    q_start = np.concatenate([b.q_start_h.array, np.full(rows - r, b.q_start_h.array[-1], np.int32)])
    kv_len = np.concatenate([b.kv_len_h.array, np.zeros(rows - r, np.int32)])
    return Batch(
        _extend(b.token, tokens, int(fill)), _extend(b.position, tokens, 0), (_extend(b.slot[0], tokens, -1),),
        torch.from_numpy(q_start.copy()), torch.from_numpy(kv_len.copy()), (blocks,), _extend(b.state_row, rows, -1),
        HostInts(q_start), HostInts(kv_len),
    )


def _extend(x: Tensor, n: int, value: int) -> Tensor:
    return torch.cat([x, torch.full((n - len(x),), value, dtype=x.dtype)])


def _int32(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a, dtype=np.int32)


def _tensor(a: np.ndarray) -> Tensor:
    return torch.from_numpy(_int32(a))
