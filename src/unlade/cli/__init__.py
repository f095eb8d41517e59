"""The command line: a face that translates arguments into calls of the library, and errors into exit codes.

`main` is the program `unlade`. Start-up time is a feature (`unlade --help` in under 150 ms), so this package
imports click and nothing else at the top of any module: the rooms of the house, and rich, are imported inside
the commands that need them. Results go to stdout, everything else to stderr (decision 11).
"""

from unlade.cli.root import main

__all__ = ["main"]
