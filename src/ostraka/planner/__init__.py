"""The cost of a checkpoint before it is written: files, bytes, memory, time, recovery.

from ostraka import sharding
from ostraka.planner import plan

planned = plan(model, mesh={"data": 64}, specs=sharding.fsdp("data"), processes=8)
print(planned.total_bytes, planned.process_spread.skew, planned.metadata_bytes)
print(planned.restore(mesh={"data": 32}, processes=4).over_read)
print(planned.times(write_bandwidth="2GB/s").save_s)
"""

from __future__ import annotations

from ostraka.planner._restore_plan import RestorePlan
from ostraka.planner._save_plan import Plan
from ostraka.planner.sources import plan
from ostraka.planner.time import Interval, Times

__all__ = ["Interval", "Plan", "RestorePlan", "Times", "plan"]
