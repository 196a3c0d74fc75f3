"""y = x Wᵀ for the few rows of a decode step, the same bits for a row at every batch size."""
