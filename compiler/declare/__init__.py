"""The front end: Hydra overrides, files and the environment to a validated RunSpec, with a fix for each mistake."""
