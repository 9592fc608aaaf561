"""The command's entry point: gathers the subcommands and turns errors into one sentence and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpu_actors.cli.bench import bench
from gpu_actors.cli.chat import chat
from gpu_actors.cli.doctor import doctor
from gpu_actors.cli.embed import embed
from gpu_actors.cli.output import error_sentence, silence_if_closed, write_error
from gpu_actors.cli.report import report
from gpu_actors.cli.serve import serve
from gpu_actors.cli.warm import warm
from gpu_actors.errors import GpuActorsError, RequestError

__all__ = ["app", "main"]

BAD_INPUT = 2
FAILED = 1
CLOSED_PIPE = 141  # 128 + SIGPIPE

app: typer.Typer = typer.Typer(
    name="gpu-actors",
    help="Asynchronous GPU attention for Python: look at this machine, chat, embed, serve, warm kernels, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (doctor, chat, embed, serve, report, warm, bench):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Take the options before the subcommand."""
    if version:
        from gpu_actors._version import __version__

        typer.echo(f"gpu-actors {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line in ``sys.argv``.

    Exits with 0, with 2 for input that cannot be used, with 1 if the work itself failed, with 130 if it was
    interrupted, and with 141, as other programs do, if the reader of the output has closed it. An error is one sentence
    on standard error, never a traceback.
    """
    sys.exit(_run())


def _run() -> int:
    output = sys.stdout
    try:
        app()
    except SystemExit as done:
        # If Typer finds the pipe closed, it puts a wrapper there and exits with 1.
        return CLOSED_PIPE if sys.stdout is not output else _code(done)
    except RequestError as error:
        write_error(error_sentence(error))
        return BAD_INPUT
    except GpuActorsError as error:
        write_error(error_sentence(error))
    except OSError as error:
        silence_if_closed(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return CLOSED_PIPE
        write_error(error_sentence(error))
    return FAILED


def _code(done: SystemExit) -> int:
    return done.code if isinstance(done.code, int) else FAILED if done.code else 0
