"""The first thing that a launcher's child does: see to it that it ends with its launcher, before it imports torch.

    python -m dflash.train.begin ranks ARGUMENTS      (or: trainer ARGUMENTS; those of dflash/train/ranks.py and trainer.py)

Importing takes seconds, on a busy machine a minute, in which a launcher may die too. Costs a thread that looks four times a
second.
"""

from __future__ import annotations

import sys

from dflash.train.parent import end_with_parent


def main() -> int:
    """Exit status: that of the trainer or rank."""
    role, *arguments = sys.argv[1:]
    end_with_parent(int(arguments[arguments.index("--parent") + 1]))
    sys.argv = [f"{sys.argv[0]} {role}", *arguments]
    if role == "ranks":
        from dflash.train import ranks

        ranks.end_now()
    from dflash.train import trainer

    return trainer.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
