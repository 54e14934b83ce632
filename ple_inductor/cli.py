"""The ``ple-inductor`` command: arguments in, exit code out.

Each command is one function here that reads its arguments and calls the module that does the work; what
is heavy (torch, the terminal library) is imported when a command runs, so that ``--help`` and
``--version`` answer at once. An error is one line on stderr and exit code 2. To add a command: add its
parser in ``_parser`` and a function that returns an exit code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from ple_inductor.step import ITEM_SIZES, Step, StepError, load_step, parse_lens


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; those of this process if None.

    Returns:
        0 if the command did what it promises, 1 if it ran and the outcome is bad, 2 for bad input, 130
        when interrupted.
    """
    arguments = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        return _replay(arguments)
    except StepError as error:
        print(f"ple-inductor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ple-inductor: interrupted", file=sys.stderr)
        return 130


def _replay(arguments: argparse.Namespace) -> int:
    step = _step(arguments)
    from ple_inductor.replay import replay
    from ple_inductor.replay_table import print_replay, progress

    with progress() as stage:
        outcome = replay(step, limited=not arguments.no_limit, stage=stage)
    if arguments.json:
        print(json.dumps(outcome.to_dict(), indent=2))
    else:
        print_replay(outcome)
    return 0 if outcome.ok else 1


def _step(arguments: argparse.Namespace) -> Step:
    names = ("channels", "dtype", "kernel_size", "dilation")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.step is not None:
        return load_step(arguments.step, given)
    if arguments.lens is not None:
        given["lens"] = parse_lens(arguments.lens)
    return Step(**given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ple-inductor: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ple-inductor",
        description="Replace padded ragged-batch code with varlen operators.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ple-inductor {version('ple-inductor')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    replay = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="run a scheduler step padded and rewritten, and compare memory, time and results",
        description="Run a scheduler step on this machine in three forms (padded eager, padded under stock "
        "Inductor, rewritten), each in its own process, and compare memory, time and results. Without "
        "options: the step of a crash that 11.8 GiB of free memory could not carry, at a tenth of its "
        "channels and of its memory.",
        epilog="Exit code: 0 if the rewritten form ran and agrees with every form that finished, 1 if not, "
        "2 for bad input.",
    )
    source = replay.add_mutually_exclusive_group()
    source.add_argument("--lens", metavar="A,B,...", help="tokens of each request (default: the crash step)")
    source.add_argument(
        "--step", metavar="FILE", type=Path, help='JSON such as {"lens": [31344, 203], "channels": 1024}'
    )
    replay.add_argument("--channels", metavar="C", type=_whole, help="default 1024; the crash had 10240")
    replay.add_argument("--dtype", help=f"{', '.join(ITEM_SIZES)} (default: bfloat16)")
    replay.add_argument("--kernel-size", metavar="K", type=_whole, help="taps (default 4)")
    replay.add_argument("--dilation", metavar="D", type=_whole, help="tokens between two taps (default 3)")
    replay.add_argument(
        "--no-limit", action="store_true", help="let every form take the memory it wants, to its end"
    )
    replay.add_argument("--json", action="store_true", help="print JSON only")
    return parser


def _whole(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _joined(argv: Sequence[str]) -> list[str]:
    """``--lens -5,3`` as ``--lens=-5,3``: the parser takes a leading minus for an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--lens" and re.match("-[0-9]", argument):
            joined[-1] = f"--lens={argument}"
        else:
            joined.append(argument)
    return joined


if __name__ == "__main__":
    sys.exit(main())
