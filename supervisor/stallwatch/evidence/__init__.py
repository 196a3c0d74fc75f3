"""Stacks, facts, reports and the ledger. Never runs in the judging thread."""
