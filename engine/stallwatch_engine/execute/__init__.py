"""Steps on a device: inputs, PLE rows, forward pass, sampling and output, in order, without waiting."""
