"""A guarded verb: what goes wrong becomes a line for the fault, one for the cure, and an exit status."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ablate.terminal import VisibleFormatter, echo

DEBUG = click.option("--debug", is_flag=True, help="Show tracebacks.")

Command = Callable[..., int | None]


def command(function: Command) -> Command:
    """Faults of the user's input become a line or two on standard error and exit status 2."""

    @wraps(function)
    def guarded(*args: Any, debug: bool, **kwargs: Any) -> None:
        _log_visibly()
        try:
            _check_here()
            status = function(*args, **kwargs)
        except KeyboardInterrupt:
            status = 130
        except BaseException as error:  # a user's own code may raise whatever it likes
            if BrokenPipeError in (type(error), type(error.__context__)):
                raise BrokenPipeError(errno.EPIPE, "nobody reads on") from None  # click ends quietly
            if debug:
                from ablate.redaction import redacted

                echo(redacted(traceback.format_exc()), err=True)
            echo(told(error, debug), err=True)
            status = 2
        sys.exit(status or 0)

    return DEBUG(guarded)


def _log_visibly() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter())
    logging.basicConfig(handlers=[handler])


def _check_here() -> None:
    """Libraries end the program, in words of their own, where no current directory is there."""
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd() is the same in more steps)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "the current directory is gone") from None


def told(error: BaseException, debug: bool) -> str:
    """One line for the fault, one for the cure."""
    faults = getattr(error, "faults", None)
    if faults:
        return "\n".join(f"{f.message}" + (f"\n  {f.cure}" if f.cure else "") for f in faults)
    if cure := getattr(error, "cure", None):
        return f"{error}\n  {cure}" if cure not in str(error) else str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return (
            f"{place}{error.strerror}\n  {_CURES.get(error.errno or 0, 'see to it that this can be read and written')}"
        )
    if not isinstance(error, Exception):
        return f"{type(error).__name__}: {error}\n  code that the experiment names ended the program"
    if isinstance(error, ValueError) or type(error).__module__.startswith("ablate") or debug:
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}\n  this is a fault of ablate; --debug shows where"


_CURES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and run again") | {
    errno.ENOENT: "see to it that it is there",
    errno.EMFILE: "allow more open files (ulimit -n) and run again",
}
