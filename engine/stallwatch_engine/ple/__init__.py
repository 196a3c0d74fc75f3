"""PLE rows of each step, from a table in this process, in a process of its own, or on disk: the same bits."""
