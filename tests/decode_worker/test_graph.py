from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from decode_worker.graph import CapturedStep, HostInput, HostInputError
from tandem.models.model import StepInputs
from tandem.ops.native import load_native
from tandem.ops.program import capture


class Device:
    """A step whose result depends on a list that the host must hand over at each replay."""

    def __init__(self, size: int) -> None:
        if not load_native().loaded:
            pytest.skip("native kernels are not available")
        self.lengths = torch.zeros(size, dtype=torch.int64)
        self.inputs = StepInputs.zeros(size, table_width=1)
        program = capture(lambda: self.inputs.positions + self.lengths)
        lengths = HostInput(name="lengths", length=size, update=self._update)
        self.step = CapturedStep(self.inputs, program, [lengths])

    def _update(self, values: Sequence[int]) -> None:
        self.lengths.copy_(torch.tensor(values))


def test_both_kinds_of_input_reach_the_replay() -> None:
    device = Device(3)
    device.inputs.positions.copy_(torch.tensor([10, 20, 30]))
    assert device.step.replay({"lengths": [1, 2, 3]}).tolist() == [11, 22, 33]
    assert device.step.replay({"lengths": [4, 5, 6]}).tolist() == [14, 25, 36]


@pytest.mark.parametrize(
    ("lists", "name", "problem"),
    [
        ({}, "lengths", "is missing"),
        ({"lengths": [7, 7]}, "lengths", "has 2 values, declared were 3"),
        ({"lengths": [7, 7, 7, 7]}, "lengths", "has 4 values"),
        ({"lengths": [7, 7, 7], "slots": [1]}, "slots", "was not declared"),
    ],
)
def test_a_replay_never_runs_on_stale_values(
    lists: dict[str, list[int]], name: str, problem: str
) -> None:
    device = Device(3)
    before = device.step.replay({"lengths": [1, 2, 3]}).clone()
    device.inputs.positions.fill_(100)
    with pytest.raises(HostInputError, match=problem) as caught:
        device.step.replay(lists)
    assert caught.value.name == name
    assert device.lengths.tolist() == [1, 2, 3]
    assert torch.equal(device.step._program.output, before)
