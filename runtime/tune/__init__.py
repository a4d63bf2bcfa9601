"""`meshloom tune`: the space of a request searched in several processes, its answer shown and written."""
