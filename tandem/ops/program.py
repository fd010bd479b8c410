"""Captures a computation as a list of operator calls on fixed memory, to be replayed in one call.

The CPU's counterpart of a CUDA or NPU graph: no compilation, only the cost of Python removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.ops.native import is_loaded

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
    }
)
_TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})  # an output has its own
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}  # c10::MemoryFormat


class CaptureError(RuntimeError):
    """Operator ``op`` cannot be part of a captured program: ``problem``."""

    def __init__(self, op: str, problem: str) -> None:
        super().__init__(op, problem)
        self.op = op
        self.problem = problem

    def __str__(self) -> str:
        return f"cannot capture {self.op}: {self.problem}"


class Program:
    """A captured computation; `replay` repeats it on whatever its input tensors hold by then."""

    def __init__(self, calls: Any, output: Tensor, memory: list[Tensor]) -> None:
        self._calls = calls
        self.output = output
        """Where every replay leaves its result."""
        self.num_calls: int = calls.size()
        self.nbytes = sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in memory}.values()
        )
        """Memory that the program holds for its intermediate results."""

    def replay(self) -> Tensor:
        """Run all calls in order; returns ``output``, overwritten by the next replay."""
        self._calls.run()
        return self.output


def capture(step: Callable[[], Tensor]) -> Program:
    """Run ``step`` once and record every operator it calls.

    Inputs must be tensors that outlive the program and are rewritten in place between replays;
    whatever else the step reads from Python is frozen at its present value.

    Raises:
        CaptureError: the step reads a tensor on the host, makes a tensor from host data, calls an
            operator that cannot write into given memory, or replays differently.
    """
    if not is_loaded():
        raise CaptureError("a step", "native kernels are not loaded")
    recorder = _Recorder()
    with torch.no_grad(), recorder:  # inference mode would hand over composite operators whole
        output = step()
    program = Program(recorder.calls, output, recorder.memory)
    expected = output.clone()
    if not torch.equal(program.replay(), expected):
        raise CaptureError("a step", "its replay gives another result than its capture")
    return program


class _Recorder(TorchDispatchMode):
    """Executes operators as usual and notes each one's `out` form on the tensors it returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = torch.classes.tandem.Program()
        self.memory: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch imports its whole compiler, for a second, to keep it from here."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_host_reads(func)
        result = func(*args, **kwargs)
        outputs = [item for item in _as_tuple(result) if isinstance(item, Tensor)]
        if func.is_view:
            return result
        if func not in _ALLOCATIONS:
            self._record(func, args, kwargs, outputs)
        self.memory += outputs
        return result

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        op = func
        if _returns_new_tensors(func):
            op = _out_form(func)
            names = [argument.name for argument in op._schema.arguments if argument.is_out]
            kwargs = {**kwargs, **dict(zip(names, outputs, strict=True))}
        schema = op._schema
        self.calls.add(schema.name, schema.overload_name, _flatten(schema.arguments, args, kwargs))


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _refuse_host_reads(func: OpOverload) -> None:
    if torch.Tag.data_dependent_output in func.tags:
        raise CaptureError(str(func), "it reads a tensor on the host")
    if torch.Tag.dynamic_output_shape in func.tags:
        raise CaptureError(str(func), "the shape of its result depends on the data")
    if func is _aten.lift_fresh.default:
        raise CaptureError(str(func), "it makes a tensor from host data, which would be frozen")


def _returns_new_tensors(func: OpOverload) -> bool:
    return any(result.alias_info is None for result in func._schema.returns)


def _signature(arguments: Sequence[Any]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments if a.name not in _TENSOR_OPTIONS]


def _out_form(func: OpOverload) -> OpOverload:
    """The overload with the same arguments that writes into given tensors."""
    wanted = _signature(func._schema.arguments)
    count = len(func._schema.returns)
    for name in func.overloadpacket.overloads():
        candidate: OpOverload = getattr(func.overloadpacket, name)
        arguments = candidate._schema.arguments
        given = [argument for argument in arguments if not argument.is_out]
        if len(arguments) - len(given) == count and _signature(given) == wanted:
            return candidate
    raise CaptureError(str(func), "it has no form that writes into given tensors")


def _flatten(arguments: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All of a schema's arguments by position, defaults filled in."""
    values = []
    for index, argument in enumerate(arguments):
        if index < len(args):
            value = args[index]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        if str(argument.type) == "Tensor" and isinstance(value, bool | int | float):
            exact = torch.float64 if isinstance(value, float) else torch.int64
            value = torch.scalar_tensor(value, dtype=exact)
        elif isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        values.append(value)
    return values
