"""Steps of a run: when to save, what to keep, what to go on from."""

from ostraka.manager._advice import Advice
from ostraka.manager._keep import Best
from ostraka.manager._manager import Manager
from ostraka.manager._steps import Step

__all__ = ["Advice", "Best", "Manager", "Step"]
