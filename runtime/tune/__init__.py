"""`meshloom tune`: searches the space of a request in several processes, and shows and writes the answer."""
