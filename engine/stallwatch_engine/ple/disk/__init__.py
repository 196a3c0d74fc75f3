"""PLE tables on disk: one file per layer, believed only with its completion record, read row by row."""
