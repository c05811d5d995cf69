"""`python -m dflash`: the command line without an installed script; what the rules call."""

from dflash.cli import main

if __name__ == "__main__":
    main()
