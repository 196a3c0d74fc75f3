"""Which tokens of which requests the next step computes. Pure: no clock, no tensor, no thread."""
