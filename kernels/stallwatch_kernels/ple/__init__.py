"""PLE: hashed n-gram features of a token stream, looked up in a huge table, gated and convolved over time."""
