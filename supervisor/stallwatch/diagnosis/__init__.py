"""From what was seen to what it is called: pure functions, no I/O."""
