"""`dflash`, and `python -m dflash`, which the rules call: Ctrl-C while modules load, which takes some tenths of a second, ends it
without a traceback."""

import signal
import sys

JOBS = ("stage", "ship-result", "write-params", "write-manifest")
"""What the rules call, from a shell in which Ctrl-C counts for nothing."""


def main() -> None:
    """Loads the command line and runs it."""
    if (sys.argv[1:2] and sys.argv[1] in JOBS) or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dflash.cli import main as run

    run()


if __name__ == "__main__":
    main()
