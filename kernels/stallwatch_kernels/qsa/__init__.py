"""Sparse attention of Qwen4-Exp: an indexer scores blocks of four tokens, a few are read, in pages."""
