"""Kernels of the embedded engine: pure functions, a torch reference of each, fast CPU and optional GPU paths."""
