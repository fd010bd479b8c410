"""Random numbers by place: each is a function of (seed, output position, token id) alone.

SplitMix64, from "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (Steele, Lea, Flood):
output number n of the generator that starts at state s is ``mix(s + (n + 1) * GAMMA)``, so any
output can be had without those before it. A seed's generator gives one number for each output
position; that number starts a second generator, which gives one number for each token id.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_MASK = 2**64 - 1
_UNIFORM_BITS = 52
"""One less than a float64 holds, so that the half step added to them is exact."""


def splitmix64(state: int, number: int) -> int:
    """Output ``number``, counted from 0, of the generator that starts at ``state``."""
    bits = (state + (number + 1) * _GAMMA) & _MASK
    bits = ((bits ^ (bits >> 30)) * _FIRST_FACTOR) & _MASK
    bits = ((bits ^ (bits >> 27)) * _SECOND_FACTOR) & _MASK
    return bits ^ (bits >> 31)


def position_state(seed: int, index: int) -> int:
    """What the numbers of output position ``index`` start from.

    The seed is mixed before it serves as a state, because the generators of two neighbouring
    states are the same sequence but for a shift.
    """
    return splitmix64(splitmix64(seed & _MASK, 0), index)


def exponentials(states: Tensor, token_ids: Tensor) -> Tensor:
    """Independent draws from the exponential distribution with rate 1.

    Args:
        states: int64, one `position_state` per row as `as_int64` gives it, ``[rows, 1]``.
        token_ids: int64, ``[rows, columns]`` or ``[columns]``.

    Returns:
        float64 ``[rows, columns]``, each above 0.
    """
    bits = (token_ids + 1) * as_int64(_GAMMA) + states  # int64 wraps as uint64 does
    bits ^= _shifted(bits, 30)
    bits *= as_int64(_FIRST_FACTOR)
    bits ^= _shifted(bits, 27)
    bits *= as_int64(_SECOND_FACTOR)
    bits ^= _shifted(bits, 31)
    uniform = _shifted(bits, 64 - _UNIFORM_BITS).to(torch.float64)
    uniform += 0.5  # never 0 and never 1: no draw is infinite and none is 0
    uniform *= 2.0**-_UNIFORM_BITS
    return uniform.log_().neg_()


def as_int64(bits: int) -> int:
    """The signed number with the same 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; torch fills int64 with the sign."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)
