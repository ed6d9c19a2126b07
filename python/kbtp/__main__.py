"""`python -m kbtp` is `kbtp`."""

from kbtp.cli import main

if __name__ == "__main__":
    main()
