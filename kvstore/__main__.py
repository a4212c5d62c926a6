"""``python -m kvstore``: the command without its console script."""

from kvstore.cli import main

main()
