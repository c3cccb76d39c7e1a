"""Others' models, optimizers, samplers and iterators, through the full cycle of a checkpoint.

Run it with `make world`; `python -m world --help` has the rest.
"""
