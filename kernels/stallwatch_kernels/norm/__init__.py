"""RMS norms: (1 + w), per stream, and gated by silu(z); and the scalar functions that other kernels share."""
