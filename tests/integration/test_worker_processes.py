from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tandem.config.tree import TandemConfig
from tandem.errors import ServingError
from tandem.requests import GenerateRequest
from tandem.testing.pair import Completion, Pair, connect
from tandem.testing.reference import new_request, random_prompt
from tandem.weights.store import ModelFolder

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]

_WORKER = """
import asyncio, json, signal, sys
from tandem.config.load import from_mapping
from tandem.weights.store import prepare
if sys.argv[1] == "prefill":
    from prefill_worker.worker import PrefillWorker as Worker
else:
    from decode_worker.worker import DecodeWorker as Worker
config = from_mapping(json.loads(sys.argv[2]))

async def main():
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    worker = Worker(config, prepare(sys.argv[3]), bytes.fromhex(sys.argv[4]), sys.argv[1], None)
    await worker.run(stopping, lambda address: print(address, flush=True))

asyncio.run(main())
"""


async def start(
    role: str, settings: TandemConfig, folder: ModelFolder, secret: bytes
) -> tuple[Process, str]:
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _WORKER,
        role,
        json.dumps(asdict(settings)),
        str(folder.path),
        secret.hex(),
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    assert address, f"the {role} worker did not start"
    return process, address


def test_processes_serve_survive_a_killed_peer_and_stop_when_told(
    folder: ModelFolder, config: Configure, expected: Expected, secret: bytes
) -> None:
    async def serve(pair: Pair) -> None:
        works = [new_request(random_prompt(9 * n + 1, n), max_tokens=9) for n in range(12)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert completion.token_ids == expected(work).token_ids
        await pair.idle()

    async def lose_prefill(pair: Pair, prefill: Process) -> None:
        calls = [
            asyncio.create_task(pair.generate(new_request(random_prompt(400, n)))) for n in range(8)
        ]
        await pair.until(lambda _, decode: decode.running > 0)
        prefill.kill()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, Completion | ServingError) for outcome in outcomes)

    async def scenario() -> list[int]:
        processes: list[Process] = []
        try:
            async with asyncio.timeout(100):
                roles = ("prefill", "decode", "prefill")
                started = await asyncio.gather(
                    *(start(role, config(), folder, secret) for role in roles)
                )
                processes += [process for process, _ in started]
                (first, where), (decode, decode_where), (second, other) = started
                async with connect(where, decode_where, secret) as pair:
                    await serve(pair)
                    await lose_prefill(pair, first)
                async with connect(other, decode_where, secret) as pair:
                    await pair.idle()
                    await serve(pair)
                for process in (decode, second):
                    process.send_signal(signal.SIGTERM)
                return [await process.wait() for process in (decode, second)]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    assert asyncio.run(scenario()) == [0, 0]
