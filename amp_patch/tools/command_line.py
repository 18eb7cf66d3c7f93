"""The command line: the names of the commands, and how their errors are told.

A command is in the module that the table names, as ``command``; it is imported when it is called,
for some need torch. Exit codes: 0, 1 where the work failed, 2 for bad arguments, in one line each;
after Ctrl-C or another signal 128 and the signal's number.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from amp_patch import __version__
from amp_patch.common.did_you_mean import near
from amp_patch.common.rules_file import RULES_BY

from .launch import exit_code_of, signals_interrupt

#: name -> the module that has it, and the line that ``amp-patch --help`` shows
COMMANDS = {
    "run": ("run", "Run a script that imports apex, with apex in place."),
    "enable": ("enable", "Let every process of this environment import apex."),
    "disable": ("disable", "Undo amp-patch enable."),
    "sweep": ("sweep.command", "Run a training script at several levels, and compare."),
    "doctor": ("doctor", "Say whether mixed precision works here, and is fast."),
    "check": ("check", "Name mistakes in training scripts without running them."),
    "compare": ("compare.command", "Compare levels with fp32, output by output."),
    "tune": ("tune.command", "Tune levels, rules and regions to a script."),
    "stats": ("stats", "Count the operators of a script by dtype, and its casts."),
    "diagnose": ("diagnose", "Find the module and operator of a script that overflow."),
}


class Commands(click.Group):
    """A group whose commands are imported one by one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"amp_patch.tools.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; where there is none of the name, say which was meant."""
        if args[0] not in COMMANDS:
            ctx.fail(_no_command(args))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, and import nothing for that."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit; every error of click's is one line."""
        kwargs["standalone_mode"] = False
        if isinstance(sys.stdout, io.TextIOWrapper):  # not all encodings have a table's lines
            sys.stdout.reconfigure(errors="replace")
        _fix_rules_file()
        try:
            with signals_interrupt():
                sys.exit(super().main(*args, **kwargs))
        except click.ClickException as error:
            message = " ".join(error.format_message().split())
            click.echo(f"{_called(error)}: {message}{_hint(error)}", err=True)
            sys.exit(error.exit_code)
        except click.Abort as error:
            sys.exit(exit_code_of(error.__cause__))
        except OSError as error:  # a full disk, a folder that is gone
            line = "amp-patch: files must stay readable and writable while a command runs; got"
            click.echo(f"{line} {error}", err=True)
            sys.exit(1)


def _fix_rules_file() -> None:
    """Make the path in the environment absolute: scripts may change the folder before it is read.

    Not the name of a profile, which has no suffix, nor a file that is missing, which the command
    tells of.
    """
    given = os.environ.get(RULES_BY, "")
    if os.path.isfile(given) and os.path.splitext(given)[1]:
        os.environ[RULES_BY] = os.path.abspath(given)


def _called(error: click.ClickException) -> str:
    """Return 'amp-patch COMMAND', as far as the error knows it."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    return "amp-patch" if context is None else context.command_path


def _hint(error: click.ClickException) -> str:
    """Return where an option belongs that stands before the command, or before ``--``."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    if error.ctx.parent:
        takes_script = any(param.name == "script" for param in error.ctx.command.params)
        is_module = takes_script and error.option_name == "-m"
        return f" Did you mean `{error.ctx.command_path} -- -m MODULE`?" if is_module else ""
    of_run = importlib.import_module("amp_patch.tools.run").command.params
    if error.option_name not in [name for param in of_run for name in param.opts]:
        return ""
    return f" Did you mean `amp-patch run {error.option_name} ...`?"


def _no_command(args: list[str]) -> str:
    """Return what to say where a command should stand and none does."""
    name = args[0]
    if name.endswith(".py") or Path(name).is_file():
        return f"{name} is no command; did you mean `amp-patch run {' '.join(args)}`?"
    close = near(name, COMMANDS, likeness=0.6)
    mend = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
    return f"No such command {name!r}; {mend}"


@click.command(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "-V", "--version", prog_name="amp-patch")
@click.pass_context
def main(context: click.Context) -> None:
    """Mixed-precision training for PyTorch.

    What stands after -- is a script with its arguments, `-m module`, or a program that starts
    Python, such as torchrun.

    \b
    amp-patch run train.py --epochs 10
    amp-patch sweep --steps 200 -- train.py --epochs 10
    amp-patch COMMAND --help
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
