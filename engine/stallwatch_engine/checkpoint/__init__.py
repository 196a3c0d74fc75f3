"""A Qwen4-Exp text checkpoint on disk: what it must hold, what it holds, and how a small one is written."""
