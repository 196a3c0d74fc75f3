"""Streams and events with deadlines: threaded on a CPU, torch's own on an accelerator."""
