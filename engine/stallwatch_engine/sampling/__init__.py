"""From logits to a token: per row, by seed and position, independent of the batch around it."""
