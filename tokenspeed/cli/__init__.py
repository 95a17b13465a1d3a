"""The command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `tokenspeed`. What the user can mend is one line on stderr and exit code 1 (2 for a wrong option)."""
    try:
        from tokenspeed.cli.app import run
    except ModuleNotFoundError as error:
        _missing(error)
    try:
        run()
    except ModuleNotFoundError as error:
        _missing(error)


def _missing(error: ModuleNotFoundError) -> None:
    """End with a hint, if it is a library that an extra brings; a missing module of our own is a fault to see."""
    if (error.name or "").partition(".")[0] in ("", "tokenspeed"):
        raise error
    sys.exit(
        f"tokenspeed: {error.name} is not installed; the command line needs pip install 'tokenspeed-sessions[server]'"
    )
