"""Which checkpoint a path means, under which names its leaves are read, and single leaves of it."""
