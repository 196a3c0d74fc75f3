"""The control plane: HTTP, metrics, events."""
