"""Stallwatch: an out-of-process supervisor for LLM inference engines."""

__version__ = "0.1.0"
