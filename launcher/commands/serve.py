"""``tandem serve``: a whole deployment on a local Ray, or on one that is joined."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launcher.commands.config import add_config_arguments
from launcher.commands.generate import complain_about_call, stream_answer
from launcher.commands.status import show
from launcher.progress import Steps, show_steps
from launcher.terminal import STDERR, libraries_quiet, write_out
from tandem.config.load import load
from tandem.logs import write_logs

if TYPE_CHECKING:
    from launcher.client import Client
    from tandem.actors import HostState
    from tandem.pb import generate_pb2

READY_PREFIX = "ready: grpc://"
"""Starts the line on stdout that says where requests are served from now on."""

_ANSWER_TOKENS = 128


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``serve``."""
    parser = commands.add_parser("serve", help="start router and workers, serve until Ctrl-C")
    add_config_arguments(parser)
    parser.add_argument("--address", metavar="RAY", help="join this Ray cluster (ray.address)")
    parser.add_argument("--model", metavar="NAME", help="model to serve (model.name)")
    parser.add_argument("--port", metavar="N", help="port to serve at (router.port)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--first", metavar="PROMPT", help="answer this prompt, then go on serving")
    prompt.add_argument("--once", metavar="PROMPT", help="answer this prompt, then stop")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, prepare the model, start Ray, serve until told to stop."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = load(arguments.config, [*arguments.sets, *_shortcuts(arguments)])
    write_logs(config.log)

    # Imported after the arguments were found right: they take a while.
    from launcher.preflight import prepare_deployment

    with libraries_quiet(), ExitStack() as display:
        steps = display.enter_context(show_steps())
        plan = prepare_deployment(config, steps)
        steps("starting Ray", 0, 0)

        from launcher.cluster import Placement, connect
        from launcher.deployment import Deployment

        with connect(plan.config, plan.cpus) as cluster:
            placement = Placement(cluster, plan)
            deployment = Deployment(plan.config, cluster, placement, _shower(steps))
            served = _Served(display, arguments.once or arguments.first, go_on=not arguments.once)
            asyncio.run(deployment.run(served))
    return served.exit_code


def _shortcuts(arguments: argparse.Namespace) -> list[str]:
    named = {
        "ray.address": arguments.address and json.dumps(arguments.address),
        "model.name": arguments.model and json.dumps(arguments.model),
        "router.port": arguments.port,
    }
    return [f"{name}={value}" for name, value in named.items() if value is not None]


def _shower(steps: Steps) -> Callable[[str, HostState], None]:
    def show_member(name: str, state: HostState) -> None:
        ready = state.phase == "ready"
        detail = state.detail.removeprefix(f"worker={name} ")
        doing = f"ready (pid {state.pid})" if ready else detail or state.phase
        steps.member(name, doing, ready)

    return show_member


class _Served:
    """What happens when a deployment serves: tell, answer a first prompt."""

    def __init__(self, display: ExitStack, prompt: str | None, *, go_on: bool) -> None:
        self._display = display
        self._prompt = prompt
        self._go_on = go_on
        self.exit_code = 0

    async def __call__(self, address: str) -> bool:
        """Tell where requests are served, answer the prompt; whether to go on serving."""
        self._display.close()
        self.exit_code = await complain_about_call(self._tell(address), address)
        if self._go_on:
            hint = f'tandem generate --address {address} --chat --prompt "Hi"'
            STDERR.print(f"Serving until Ctrl-C; try: {hint}", soft_wrap=True)
        return self._go_on

    async def _tell(self, address: str) -> None:
        from launcher.client import Client

        async with Client(address) as client:
            show(await client.status(), STDERR)
            write_out(f"{READY_PREFIX}{address}\n")
            if self._prompt is not None:
                await _answer(client, self._prompt)


async def _answer(client: Client, prompt: str) -> None:
    request = _first_request(prompt, (await client.model_info()).has_chat_template)
    STDERR.print(f"\n> {prompt}", markup=False)
    await stream_answer(client.stream(request))


def _first_request(prompt: str, chat: bool) -> generate_pb2.GenerateRequest:
    from launcher.client import chat_request, text_request

    request = (
        chat_request([("user", prompt)], max_tokens=_ANSWER_TOKENS)
        if chat
        else text_request(prompt, max_tokens=_ANSWER_TOKENS)
    )
    request.sampling.temperature = 0
    return request
