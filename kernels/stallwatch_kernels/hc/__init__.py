"""Hyper-connections: several residual streams, read into one row, written back, and folded at the end."""
