"""`python -m acceptmoe` is the command line."""

from acceptmoe.cli import main

main()
