"""The typed, frozen values that passes read: of a declaration, and of the files that describe targets."""
