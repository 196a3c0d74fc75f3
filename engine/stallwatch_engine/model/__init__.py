"""The forward pass: blocks bound once to static buffers, then called with the numbers of a step."""
