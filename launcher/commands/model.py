"""``tandem model``: fetch a model, or say what one is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from launcher.progress import show_steps
from launcher.terminal import write_out

if TYPE_CHECKING:
    from tandem.weights.store import ModelFolder


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``model pull`` and ``model info``."""
    parser = commands.add_parser("model", help="fetch a model, or say what one is")
    verbs = parser.add_subparsers(dest="verb", required=True)
    pull = verbs.add_parser("pull", help="download a known model and keep it")
    pull.add_argument("name", metavar="NAME", help="for example smollm2")
    pull.set_defaults(run=run_pull)
    info = verbs.add_parser("info", help="say what a model is")
    info.add_argument("name", metavar="NAME", help="known name, folder or .gguf file")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=run_info)


def run_pull(arguments: argparse.Namespace) -> int:
    """Download a model unless it is there."""
    from tandem.weights.store import pull

    with show_steps() as progress:
        path = pull(arguments.name, progress)
    write_out(f"{path}\n")
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Print what a model's files say."""
    from tandem.weights.store import prepare

    with show_steps() as progress:
        folder = prepare(arguments.name, progress)
    shown = as_json(folder)
    if arguments.json:
        write_out(json.dumps(shown) + "\n")
    else:
        width = max(map(len, shown))
        write_out("".join(f"{name:{width}}  {value}\n" for name, value in shown.items()))
    return 0


def as_json(folder: ModelFolder) -> dict[str, object]:
    """A model as ``--json`` prints it."""
    from tandem.tokenizer import load_tokenizer

    return {
        "name": folder.name,
        "path": str(folder.path),
        "weights_digest": folder.weights_digest,
        "has_chat_template": load_tokenizer(folder).has_chat_template,
        **asdict(folder.spec),
    }
