"""Every way this project fails, in four kinds, because who must act differs by kind.

`ConfigError`: the user's input is wrong (exit 2). `PermanentError`: retrying cannot help: refused, incompatible, denied,
full. `TransientError`: a retry may help: network, a lost rank, a killed process. `CorruptError`: bytes or records are not
what they claim to be. `DecisionNeeded`: nothing is wrong, but only a person may choose.

A message says what happened, where (file, key, host, step) and what to do. Costs nothing to import.
"""

from __future__ import annotations


class DflashError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line returns for it.

    Args:
        what: what happened, one sentence, with the offending value.
        where: file, key, host or step; empty when `what` already says it.
        remedy: what the reader should do next; empty only when nothing can be done.
    """

    kind = "error"
    exit_code = 1
    told = False
    """Whether the reader has seen the message already, so that the command line need not print it."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(self.message())

    def message(self) -> str:
        """The one-line form that people see: `where: what. remedy`."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head.rstrip('.')}. {self.remedy}" if self.remedy else head


class ConfigError(DflashError):
    """The user's input is wrong: names file, key and the value given."""

    kind = "config"
    exit_code = 2


class PermanentError(DflashError):
    """Retrying cannot help. Stage runners leave its cause beside the stage, so that retries of one run stop at once."""

    kind = "permanent"


class TransientError(DflashError):
    """A retry may help."""

    kind = "transient"


class CorruptError(DflashError):
    """Bytes or records are not what they claim to be; never trusted, never overwritten in silence."""

    kind = "corrupt"


class DecisionNeeded(DflashError):
    """Work would be redone or kept in a way that only a person may choose."""

    kind = "decision"
