"""`python -m unlade`: the same as the command `unlade`."""

from unlade.cli import main

main()
