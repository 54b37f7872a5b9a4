"""The one error of the command line: all faults together."""

from __future__ import annotations


class ArgumentErrors(ValueError):
    """Every fault of a command line or configuration, one line each: flag, value, problem, fix."""

    def __init__(self, faults: list[str]):
        self.faults = list(dict.fromkeys(faults))
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n  ".join([f"{count} in the settings:", *self.faults]))
