"""How a step's token ids reach the PLE backend: from the host's own copies (MRV1), or staged from the device (MRV2)."""
