from __future__ import annotations

import asyncio
import threading

import pytest

from tandem.device import DeviceThread


def test_all_work_runs_in_one_thread_and_errors_are_results() -> None:
    async def scenario() -> None:
        device = DeviceThread("device")
        first = await device.run(threading.get_ident)
        second = await device.run(threading.get_ident)
        assert first.result() == second.result() != threading.get_ident()
        failed = await device.run(lambda: 1 // 0)
        assert isinstance(failed.exception(), ZeroDivisionError)
        device.close()
        with pytest.raises(RuntimeError):
            await device.run(lambda: None)

    asyncio.run(scenario())


def test_cancelling_the_wait_leaves_the_work_alone() -> None:
    async def scenario() -> None:
        device = DeviceThread("device")
        begun, release = threading.Event(), threading.Event()
        ended: list[bool] = []

        def work() -> None:
            begun.set()
            release.wait()
            ended.append(True)

        waiting = asyncio.create_task(device.run(work))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release.set()
        await device.run(lambda: None)
        assert ended == [True]
        device.close()

    asyncio.run(scenario())


def test_workers_share_the_model_that_the_first_loaded() -> None:
    device = DeviceThread("device")
    loads: list[int] = []

    def load() -> object:
        loads.append(1)
        return object()

    assert device.model(load) is device.model(load)  # type: ignore[arg-type]
    assert loads == [1]
    device.close()
