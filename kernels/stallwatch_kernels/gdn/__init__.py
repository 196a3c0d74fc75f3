"""GatedDeltaNet between its projections: causal convolution and gated delta rule over per-request state slots."""
