"""Interim."""
from typing import Any
import attrs, numpy as np, torch
from afl.tree import struct
@struct
class SampleRows:
    temperature: Any; top_k: Any; top_p: Any; min_p: Any; u: Any
@struct
class Edits:
    row: Any; token: Any; bias: Any; repeat: Any; minus: Any
@attrs.frozen
class SamplingParams:
    max_tokens: int | None = None; temperature: float = 0.0; top_k: int = 0; top_p: float = 1.0; min_p: float = 0.0
    repetition_penalty: float = 1.0; frequency_penalty: float = 0.0; presence_penalty: float = 0.0
    logit_bias: Any = attrs.field(factory=dict); bad_words_ids: tuple = (); min_tokens: int = 0; stop: tuple = (); stop_ids: tuple = ()
    ignore_eos: bool = False; include_stop: bool = False; logprobs: int | None = None; seed: int | None = None; n: int = 1
    needs_host = False
    def validate(self, v, m): pass
    def child(self, i): return attrs.evolve(self, seed=None if self.seed is None else self.seed + i, n=1)
    @classmethod
    def of(cls, g, **k): return cls(**k)
class SampleTable:
    def __init__(self, n, v): pass
    def set(self, *a): pass
    def plain(self, rows): return True
    def logprob_rows(self, *a): return []
def pad_rows(*a): return a
