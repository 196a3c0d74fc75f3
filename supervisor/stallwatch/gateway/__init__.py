"""The gateway: an OpenAI-compatible pass-through in which every request gets an answer."""
