"""Decode steps on fixed inputs: captured once per bucket and replayed, or run eagerly.

Inputs are of two kinds. Device tensors are rewritten in place between replays. Host lists are
declared by name and length and must come with every replay, because a device may bake them into
its operators at capture; a replay without them would run on stale values, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.cache.pool import KVPool
from tandem.models.model import Model, StepInputs
from tandem.ops.program import Program, capture


class HostInputError(ValueError):
    """A replay came without host list ``name`` as declared: ``problem``."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"host input {self.name}: {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInput:
    """A list that the host hands over with every replay."""

    name: str
    """The field of `StepInputs` whose values it carries."""
    length: int
    """Exactly so many values, padded rows included."""
    update: Callable[[Sequence[int]], None]
    """Puts the values where the captured operators read them."""


class Step(Protocol):
    """One bucket's decode step."""

    inputs: StepInputs
    host_inputs: tuple[HostInput, ...]

    def replay(self, host_lists: Mapping[str, Sequence[int]]) -> Tensor:
        """Compute the step on what ``inputs`` and ``host_lists`` hold now.

        Returns:
            Logits [B, vocab_size]; overwritten by the next replay.

        Raises:
            HostInputError: a declared list is missing or of the wrong length, or an undeclared one
                came; nothing was computed.
        """


class CapturedStep:
    """A step replayed as one native call."""

    def __init__(
        self, inputs: StepInputs, program: Program, host_inputs: Sequence[HostInput] = ()
    ) -> None:
        self.inputs = inputs
        self.host_inputs = tuple(host_inputs)
        self.nbytes = program.nbytes
        """Memory held for intermediate results."""
        self._program = program

    @classmethod
    def capture(cls, model: Model, pool: KVPool, inputs: StepInputs) -> CapturedStep:
        """Capture ``model``'s step on ``inputs``, which must hold padded rows only.

        The CPU's operators read all they need from tensors, so no host lists are declared.

        Raises:
            CaptureError: the step cannot be replayed.
        """
        return cls(inputs, capture(lambda: model.decode(inputs, pool)))

    def replay(self, host_lists: Mapping[str, Sequence[int]]) -> Tensor:
        """See `Step.replay`."""
        update_host_inputs(self.host_inputs, host_lists)
        return self._program.replay()


class EagerStep:
    """A step computed operator by operator, on the same inputs and in the same way."""

    def __init__(self, model: Model, pool: KVPool, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.host_inputs: tuple[HostInput, ...] = ()
        self._model = model
        self._pool = pool

    def replay(self, host_lists: Mapping[str, Sequence[int]]) -> Tensor:
        """See `Step.replay`."""
        update_host_inputs(self.host_inputs, host_lists)
        with torch.inference_mode():
            return self._model.decode(self.inputs, self._pool)


def update_host_inputs(
    declared: Sequence[HostInput], host_lists: Mapping[str, Sequence[int]]
) -> None:
    """Check all lists against their declarations, then hand each one over.

    Raises:
        HostInputError: see `Step.replay`.
    """
    names = {host_input.name for host_input in declared}
    for name in host_lists:
        if name not in names:
            raise HostInputError(name, "was not declared at capture")
    for host_input in declared:
        values = host_lists.get(host_input.name)
        if values is None:
            raise HostInputError(host_input.name, "is missing; the replay would use stale values")
        if len(values) != host_input.length:
            raise HostInputError(
                host_input.name, f"has {len(values)} values, declared were {host_input.length}"
            )
    for host_input in declared:
        host_input.update(host_lists[host_input.name])
