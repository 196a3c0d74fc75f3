"""Telling the outside of a failure: a command or a webhook, each in a thread of its own."""
