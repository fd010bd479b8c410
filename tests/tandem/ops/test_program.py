from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional

from tandem.ops import library as ops
from tandem.ops.native import load_native
from tandem.ops.program import CaptureError, capture


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    status = load_native()
    if not status.loaded:
        pytest.skip(f"native kernels: {status.detail}")


@pytest.fixture(scope="module", autouse=True)
def op_without_out_form() -> Iterator[None]:
    library = Library("tandem_test", "DEF")
    library.define("no_out(Tensor x) -> Tensor")
    library.impl("no_out", lambda x: x + 1, "CPU")
    yield
    library._destroy()


def test_a_replay_computes_on_what_the_inputs_hold_by_then() -> None:
    x, weight = torch.ones(4, 8), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))

    def step() -> Tensor:
        y = functional.linear(x, weight) * 2.0 + 1
        z = functional.silu(y).view(2, 32)
        first, second = z.chunk(2, dim=-1)
        total, normed = ops.add_rms_norm(
            first.contiguous(), second.contiguous(), weight.view(-1)[:16], 1e-5
        )
        return torch.cat((total, normed)).float()

    program = capture(step)
    for value in (2.0, -0.5):
        x.fill_(value)
        assert torch.equal(program.replay(), step())
    assert program.replay() is program.output


def test_writes_into_given_memory_are_replayed() -> None:
    x, pages = torch.zeros(3), torch.zeros(5, 3)

    def step() -> Tensor:
        pages[2].copy_(x)
        return pages.sum(0)

    program = capture(step)
    x.fill_(4.0)
    assert program.replay().tolist() == [4.0, 4.0, 4.0]
    assert pages[2].tolist() == [4.0, 4.0, 4.0]


def test_a_program_knows_its_size() -> None:
    x = torch.zeros(100)
    program = capture(lambda: x + 1.0 + 2.0)
    assert program.num_calls == 2
    assert program.nbytes == 800


X = torch.ones(4)


@pytest.mark.parametrize(
    ("step", "op", "problem"),
    [
        (lambda: X * X.sum().item(), "aten._local_scalar_dense", "reads a tensor on the host"),
        (lambda: X[X > 0], "aten.", "depends on the data"),
        (lambda: X + torch.tensor([1.0, 2.0, 3.0, 4.0]), "aten.lift_fresh", "host data"),
        (lambda: torch.ops.tandem_test.no_out(X), "tandem_test.no_out", "no form that writes"),
    ],
)
def test_what_cannot_be_captured_is_named(
    step: Callable[[], Tensor], op: str, problem: str
) -> None:
    with pytest.raises(CaptureError, match=problem) as caught:
        capture(step)
    assert caught.value.op.startswith(op)


def test_a_step_that_changes_its_own_inputs_is_refused() -> None:
    counter = torch.zeros(1)

    def step() -> Tensor:
        counter.add_(1)
        return counter * 2

    with pytest.raises(CaptureError, match="another result"):
        capture(step)


FROM_SCRATCH = """
import sys
import torch
from tandem.ops import library as ops
from tandem.ops.native import load_native
from tandem.ops.program import capture
assert load_native().loaded
x = torch.ones(2, 3)
capture(lambda: ops.linear(x, x)).replay()
sys.stdout.write(",".join(m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules))
"""


def test_capture_does_not_load_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FROM_SCRATCH], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
