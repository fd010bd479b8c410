"""The ``tandem`` command.

Exit codes: 0 done; 1 it could not be done, with one line that says why; 2 wrong usage or
configuration; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from launcher.commands import config, generate, model, serve, status
from launcher.terminal import complain
from tandem import __version__
from tandem.errors import ConfigError, ServingError

INTERRUPTED = 128 + signal.SIGINT


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serve language models with prefill and decode apart."
    )
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve, generate, status, model, config):
        command.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except ConfigError as error:
        complain(str(error))
        return 2
    except ServingError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
