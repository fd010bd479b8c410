"""``tandem status``: how a running server and its workers are doing."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from launcher.commands.generate import add_address_argument, message_fields, run_call
from launcher.terminal import STDOUT, write_out

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.pb import generate_pb2

_TIMEOUT_S = 10.0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``status``."""
    parser = commands.add_parser("status", help="show a running server and its workers")
    add_address_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the server and show its answer."""
    return run_call(_status(arguments), arguments.address)


async def _status(arguments: argparse.Namespace) -> None:
    from launcher.client import Client

    async with Client(arguments.address) as client:
        status = await client.status(_TIMEOUT_S)
    if arguments.json:
        write_out(json.dumps(as_json(status)) + "\n")
    else:
        show(status, STDOUT)


def as_json(status: generate_pb2.GetStatusResponse) -> dict[str, object]:
    """A status as ``--json`` prints it."""
    return message_fields(status) | {
        "workers": [message_fields(worker) for worker in status.workers]
    }


def show(status: generate_pb2.GetStatusResponse, console: Console) -> None:
    """Show a status as a table."""
    from rich.table import Table

    table = Table(
        "worker", "role", "state", "pid", "incarnation", "pages", "running", "queued", "transfers",
        "preemptions", "decode steps", box=None, pad_edge=False,
    )  # fmt: skip
    for worker in status.workers:
        cached = f" +{worker.pages_cached} cached" if worker.pages_cached else ""
        swapped = f" +{worker.pages_swapped} swapped" if worker.pages_swapped else ""
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.state,
            str(worker.pid),
            worker.incarnation[:8],
            f"{worker.pages_used}/{worker.pages_total}{cached}{swapped}",
            str(worker.running),
            str(worker.queued),
            str(worker.transfers_pending),
            str(worker.preemptions),
            worker.graph,
        )
    console.print(
        f"Tandem {status.version}, {status.mode}: {status.requests_running} requests running, "
        f"{status.requests_queued} queued"
    )
    console.print(table)
