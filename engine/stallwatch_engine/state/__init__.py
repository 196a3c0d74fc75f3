"""What an engine remembers of a request between steps: pages, slots, the tensors behind them, their leases."""
