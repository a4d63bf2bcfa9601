"""`python -m meshloom` and the `meshloom` command."""

import sys

if __name__ == "__main__":
    # Python puts the working directory first on the path of `-m`: its files would be imported instead of anyone's.
    if not sys.flags.safe_path:
        del sys.path[0]

from meshloom.runtime.cli.main import main

if __name__ == "__main__":
    main()
