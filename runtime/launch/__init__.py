"""Starting a run on every host of a target, by engines that exist: what they get, and how they are told to restart."""
