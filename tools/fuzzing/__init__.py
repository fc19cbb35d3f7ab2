"""What `tools/fuzz.py` is made of: files to start from, what is done to them, and what must come of that."""
