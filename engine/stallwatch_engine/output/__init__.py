"""From tensors on the device to one answer per step: an Output, or a Failure that says why not."""
