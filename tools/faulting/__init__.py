"""The parts of `tools/faults.py`: what is done to a run, what is seen of it, and what is said of that."""
