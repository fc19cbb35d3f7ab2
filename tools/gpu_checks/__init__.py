"""What `tools/gpu_check.py` is made of: stages of checks, and how they are run, timed and told."""
