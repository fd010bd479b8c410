"""``tandem config``: show the configuration in effect, and what may be set."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from launcher.terminal import write_out
from tandem.config.load import load, to_mapping
from tandem.config.schema import json_schema, markdown
from tandem.config.tree import TandemConfig
from tandem.config.yamls import render


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``config show`` and ``config schema``."""
    parser = commands.add_parser("config", help="show the configuration, or its schema")
    verbs = parser.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show", help="print the configuration in effect as YAML")
    add_config_arguments(show)
    show.set_defaults(run=run_show)
    schema = verbs.add_parser("schema", help="print the JSON Schema of the configuration")
    schema.add_argument("--markdown", action="store_true", help="print tables for people instead")
    schema.set_defaults(run=run_schema)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--config`` and ``--set``, alike for all commands that read a configuration."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration in YAML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="a.b=value",
        help="set one value, winning over the file; may be repeated",
    )


def read_config(arguments: argparse.Namespace) -> TandemConfig:
    """Load the configuration that the arguments name.

    Raises:
        ConfigError: a setting is wrong.
    """
    return load(arguments.config, arguments.sets)


def run_show(arguments: argparse.Namespace) -> int:
    """Print the effective tree."""
    write_out(render(to_mapping(read_config(arguments))))
    return 0


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    write_out(markdown() if arguments.markdown else json.dumps(json_schema(), indent=2) + "\n")
    return 0
