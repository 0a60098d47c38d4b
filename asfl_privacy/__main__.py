"""`python -m asfl_privacy` is the command `asfl-privacy`."""

from asfl_privacy.cli import main

if __name__ == "__main__":
    main()
