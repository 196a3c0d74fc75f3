"""Faults on purpose: injected into a running engine, or a scenario with its own supervisor."""
