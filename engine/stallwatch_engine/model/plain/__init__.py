"""The same model in plain torch, on any device: what an accelerator runs, and a second opinion on a CPU."""
