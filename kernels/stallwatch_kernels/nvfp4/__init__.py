"""NVFP4: two four-bit floats a byte, one E4M3 scale per 16, one fp32 scale over all."""
