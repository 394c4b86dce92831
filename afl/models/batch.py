"""What a model's step sees: the packed inputs of one step (`Batch`) and the state that it hands on (`ModelState`)."""

from typing import Any

from torch import Tensor

from afl.tree import struct
from afl.types import HostInts


@struct
class Batch:
    """Inputs of one step; t tokens of r rows lie one row after the other.

    Tokens past q_start[-1] are padding: slot -1.  A padding row has no tokens and kv_len 0.
    """

    token: Tensor                    # int32 [t]; -1-row: take it from last_token[row]
    position: Tensor                 # int32 [t]
    slot: tuple[Tensor, ...]         # int32 [t] per cache group; -1 = written nowhere
    q_start: Tensor                  # int32 [r+1]
    kv_len: Tensor                   # int32 [r], this step's tokens included
    blocks: tuple[Tensor, ...]       # int32 [r, w] per cache group, padded with the null block 0
    state_row: Tensor                # int32 [r], place of the row in per-request state; -1 = none
    q_start_h: HostInts              # the same numbers on the host
    kv_len_h: HostInts


@struct
class ModelState:
    """What a step hands to the next one.  Donated: reading a state that was given away raises."""

    caches: tuple[Any, ...]          # one cache struct per layer
    last_token: Tensor               # int32 [rows_max], newest token of each row
