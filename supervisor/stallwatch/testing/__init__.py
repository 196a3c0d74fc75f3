"""Fakes for tests: one module per noun."""
