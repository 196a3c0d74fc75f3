"""The supervisor's side of the board: make it, read it, write the control word."""
