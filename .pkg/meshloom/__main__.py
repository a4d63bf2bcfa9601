"""`python -m meshloom` and the `meshloom` command."""

from meshloom.runtime.cli import main

if __name__ == "__main__":
    main()
