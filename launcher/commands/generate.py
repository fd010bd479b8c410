"""``tandem generate``: one request, its answer streamed to stdout."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from launcher.terminal import STDERR, complain, write_out
from tandem.errors import ConfigError

if TYPE_CHECKING:  # both take a while to import, which --help and wrong usage need not wait for
    from launcher.client import Generation
    from tandem.pb import generate_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type of argument: whole numbers that fit the field they are sent in."""

    def parse(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not between {low} and {high}")
        return number

    return parse


def positive_seconds(text: str) -> float:
    """A type of argument: seconds above 0."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0")
    return seconds


def add_address_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--address`` of a running server."""
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"server to call (default {DEFAULT_ADDRESS})",
    )


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``generate``."""
    parser = commands.add_parser("generate", help="send one request and stream its answer")
    int64 = whole(-(2**63), 2**63 - 1)
    add_address_argument(parser)
    parser.add_argument("--prompt", required=True, help="text to continue; - reads stdin")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's chat message")
    parser.add_argument("--model", help="which model must answer")
    parser.add_argument("--max-tokens", type=int64, metavar="N", help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=whole(-(2**31), 2**31 - 1), metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--min-p", type=float, metavar="P")
    parser.add_argument(
        "--seed", type=whole(0, 2**64 - 1), metavar="S", help="the same seed gives the same tokens"
    )
    parser.add_argument(
        "--stop", nargs="+", default=[], metavar="STR", help="text at which generation ends"
    )
    parser.add_argument(
        "--logprobs",
        type=whole(0, 2**31 - 1),
        nargs="?",
        const=0,
        metavar="N",
        help="log-probabilities of the tokens, and of the N likeliest; needs --json",
    )
    parser.add_argument(
        "--timeout", type=positive_seconds, metavar="S", help="give up after this many seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send the request; Ctrl-C cancels it."""
    if arguments.logprobs is not None and not arguments.json:
        raise ConfigError("--logprobs", "needs --json, which shows them")
    request = build_request(arguments)
    return run_call(_generate(arguments, request), arguments.address)


def build_request(arguments: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """Put the arguments into a request; what was not given stays absent.

    Raises:
        ConfigError: the prompt is no text.
    """
    from tandem.pb import generate_pb2

    request = generate_pb2.GenerateRequest()
    prompt = _readable(arguments.prompt)
    if arguments.chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    if arguments.model is not None:
        request.model = arguments.model
    if arguments.max_tokens is not None:
        request.stopping.max_tokens = arguments.max_tokens
    request.stopping.stop.extend(arguments.stop)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        if (value := getattr(arguments, name)) is not None:
            setattr(request.sampling, name, value)
    if arguments.logprobs is not None:
        request.sampling.logprobs = True
        request.sampling.top_logprobs = arguments.logprobs
    return request


def _readable(prompt: str) -> str:
    """The prompt as text that can be sent; ``-`` stands for stdin."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return prompt.encode("utf-8").decode("utf-8")  # refuses what the shell gave as raw bytes
    except UnicodeError as error:
        raise ConfigError("--prompt", "is not UTF-8 text") from error


def run_call(call: Coroutine[Any, Any, None], address: str) -> int:
    """Run something that calls a server; says in one line with what status it failed."""
    return asyncio.run(complain_about_call(call, address))


async def complain_about_call(call: Coroutine[Any, Any, None], address: str) -> int:
    """Await something that calls a server; the exit code."""
    import grpc.aio

    try:
        await call
    except grpc.aio.AioRpcError as error:
        hint = ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            hint = f" (is a server running at {address}?)"
        complain(f"{error.code().name}: {error.details()}{hint}")
        return 1
    return 0


async def _generate(arguments: argparse.Namespace, request: generate_pb2.GenerateRequest) -> None:
    from launcher.client import Client

    async with Client(arguments.address) as client:
        if arguments.json:
            generation = await client.generate(request, arguments.timeout)
            write_out(json.dumps(as_json(generation), ensure_ascii=False) + "\n")
        else:
            await stream_answer(client.stream(request, arguments.timeout))


async def stream_answer(
    responses: AsyncGenerator[generate_pb2.GenerateResponse, None],
) -> Generation:
    """Write the text of a stream to stdout as it comes, then a table of times to stderr."""
    from launcher.client import Generation

    generation = Generation()
    async with aclosing(responses):
        async for response in responses:
            generation.add(response)
            write_out(response.chunk.text)
    write_out("\n")
    show_timings(generation)
    return generation


def show_timings(generation: Generation) -> None:
    """Show where the time of one request went."""
    from rich.table import Table

    timings, usage = generation.timings, generation.usage
    table = Table("step", "time", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for step, milliseconds in (
        ("queue", timings.queue_ms + timings.prefill_queue_ms),
        ("prefill", timings.prefill_ms),
        ("transfer", timings.transfer_ms),
        ("first token", timings.first_token_ms),
        ("per token", timings.per_token_ms),
        ("total", timings.total_ms),
    ):
        table.add_row(step, f"{milliseconds:.1f} ms")
    STDERR.print()
    STDERR.print(table)
    STDERR.print(
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated, finish reason {generation.finish_reason}"
    )


def as_json(generation: Generation) -> dict[str, object]:
    """A generation as ``--json`` prints it."""
    shown: dict[str, object] = {
        "request_id": generation.request_id,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "usage": message_fields(generation.usage),
        "timings": message_fields(generation.timings),
    }
    if generation.logprobs:
        shown["logprobs"] = [
            {
                "logprob": position.logprob,
                "top": [[entry.token_id, entry.logprob] for entry in position.top],
            }
            for position in generation.logprobs
        ]
    return shown


def message_fields(message: Any) -> dict[str, object]:
    """All plain fields of a message by name, those at their default included."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
