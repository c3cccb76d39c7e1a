"""The benchmark: Ostraka against Orbax, PyTorch DCP and bare reads and writes, in one run.

Run `python -m bench` from the root of the repository.
"""
