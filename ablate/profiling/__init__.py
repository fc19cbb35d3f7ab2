"""What is measured, and how: time, memory, decoding, kernels and FLOPs."""
