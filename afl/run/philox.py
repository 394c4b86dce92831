"""One uniform number per (seed, position, purpose) from the counter generator Philox4x32-10.

Source: Salmon et al. 2011 (doi:10.1145/2063384.2063405).  Key = the seed's two words, counter = (0, position, purpose,
0), so a number depends on the request alone: not on batch, order, chip or thread.
"""

import numba
import numpy as np

from afl.machine_code import kept

SAMPLE = 0                # purpose: the token of a position
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds on counter uint32 [n, 4] with key uint32 [n, 2]: uint32 [n, 4]."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key[:, 0].astype(np.uint64), key[:, 1].astype(np.uint64)
    for _ in range(10):
        a, b = c[0] * np.uint64(_M0), c[2] * np.uint64(_M1)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k0, b & _LOW, (a >> np.uint64(32)) ^ c[3] ^ k1, a & _LOW]
        k0, k1 = (k0 + np.uint64(_W0)) & _LOW, (k1 + np.uint64(_W1)) & _LOW
    return np.stack(c, 1).astype(np.uint32)


@kept(numba.njit)
def uniform(seed, position, purpose):
    """One number in (0, 1) for compiled loops: 52 bits of two words, plus one half, so that neither border is reached.

    seed, purpose: uint64; position >= 0.  Twenty-four bits would be coarser than the mass of rare tokens in a
    vocabulary of 150,000.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    m0, m1, w0, w1 = np.uint64(_M0), np.uint64(_M1), np.uint64(_W0), np.uint64(_W1)
    c0, c1, c2, c3 = np.uint64(0), np.uint64(position) & low, purpose, np.uint64(0)
    k0, k1 = seed & low, seed >> half
    for _ in range(10):
        a, b = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + w0) & low, (k1 + w1) & low
    bits = (c0 >> np.uint64(6)) << np.uint64(26) | (c1 >> np.uint64(6))
    return (np.float64(bits) + 0.5) * 2.0**-52


def uniforms(seed: np.ndarray, position: np.ndarray, purpose: int = SAMPLE) -> np.ndarray:
    """f64 [r] of `uniform`: seed uint64 [r], position int64 [r]."""
    return _loop(np.asarray(seed, np.uint64), np.asarray(position, np.int64), np.uint64(purpose))


@kept(numba.njit)
def _loop(seed, position, purpose):
    out = np.empty(seed.shape[0])
    for i in range(seed.shape[0]):
        out[i] = uniform(seed[i], position[i], purpose)
    return out


def uniforms_plain(seed: np.ndarray, position: np.ndarray, purpose: int = SAMPLE) -> np.ndarray:
    """The same in plain numpy."""
    seed, position = np.asarray(seed, np.uint64), np.asarray(position, np.uint64)
    zero = np.zeros(len(seed), np.uint64)
    counter = np.stack([zero, position & _LOW, zero + np.uint64(purpose), zero], 1)
    w = philox(counter, np.stack([seed & _LOW, seed >> np.uint64(32)], 1))
    high, low = (w[:, 0] >> 6).astype(np.uint64), (w[:, 1] >> 6).astype(np.uint64)
    return ((high << np.uint64(26) | low).astype(np.float64) + 0.5) * 2.0**-52
