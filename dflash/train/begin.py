"""The first thing that a launcher's child does, before it imports torch: see to it that it ends with its launcher, and that a
request to end which comes meanwhile is heard.

    python -m dflash.train.begin ranks ARGUMENTS      (or: trainer ARGUMENTS; those of dflash/train/ranks.py and trainer.py;
                                                       `rehearsed-` before either for a rehearsal)

Importing takes seconds, on a busy machine a minute. Costs nothing.
"""

from __future__ import annotations

import sys

from dflash.base.loading import loading
from dflash.train.parent import end_with_parent, hear_requests

REHEARSED = "rehearsed-"
"""What stands before the role of a process that rehearses it."""


def main() -> int:
    """Exit status: that of the trainer or rank."""
    role, *arguments = sys.argv[1:]
    end_with_parent(int(arguments[arguments.index("--parent") + 1]))
    ending = hear_requests()
    sys.argv = [f"{sys.argv[0]} {role}", *arguments]
    if role.startswith(REHEARSED):
        with loading():
            from dflash.train import rehearsed
        rehearsed.end_now(role.removeprefix(REHEARSED), arguments, ending)
    if role == "ranks":
        with loading():
            from dflash.train import ranks
        ranks.end_now(ending)
    with loading():
        from dflash.train import trainer

    return trainer.main(arguments, ending)


if __name__ == "__main__":
    sys.exit(main())
