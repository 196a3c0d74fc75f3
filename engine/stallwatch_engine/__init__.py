"""What runs inside or beside an engine: the vLLM plugin and its phase maps."""
