from __future__ import annotations

import asyncio

import pytest

from decode_worker.outbox import Outbox, join_chunks
from tandem.errors import WorkerError
from tandem.requests import OutputChunk, TokenLogprobs


def chunk(index: int, last: bool = False) -> OutputChunk:
    return OutputChunk(
        index=index,
        token_ids=(100 + index,),
        text=chr(97 + index),
        logprobs=(TokenLogprobs(logprob=-float(index)),),
        finish_reason="length" if last else None,
    )


def test_unread_chunks_are_joined_without_loss() -> None:
    whole = join_chunks([chunk(3), chunk(4), chunk(5, last=True)])
    assert (whole.index, whole.token_ids, whole.text) == (3, (103, 104, 105), "def")
    assert [entry.logprob for entry in whole.logprobs] == [-3.0, -4.0, -5.0]
    assert whole.finish_reason == "length"
    assert join_chunks([chunk(1)]) == chunk(1)


def test_the_reader_waits_and_takes_all_that_is_there() -> None:
    async def scenario() -> None:
        box = Outbox(2)
        taking = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        assert not taking.done()
        box.put(chunk(0))
        assert await taking == chunk(0)
        fullness = [box.full]
        for index in (1, 2):
            box.put(chunk(index))
            fullness.append(box.full)
        assert (await box.take()).token_ids == (101, 102)
        assert [*fullness, box.full] == [False, False, True, False]

    asyncio.run(scenario())


def test_an_error_comes_after_the_chunks_before_it() -> None:
    async def scenario() -> None:
        box = Outbox(4)
        box.put(chunk(0))
        box.fail(WorkerError("w", "broke"))
        assert await box.take() == chunk(0)
        for _ in range(2):
            with pytest.raises(WorkerError, match="broke"):
                await box.take()

    asyncio.run(scenario())
