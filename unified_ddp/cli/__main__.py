"""`python -m unified_ddp.cli`."""

from unified_ddp.cli import main

if __name__ == "__main__":
    main()
