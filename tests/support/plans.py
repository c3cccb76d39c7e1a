"""What plans come to, counted apart from the product."""

from ostraka.layout.plan_write import WritePlan


def bytes_by_process(plan: WritePlan) -> list[int]:
    """The data bytes that each process writes, headers not counted."""
    totals = [0] * (max(plan.process_of) + 1)
    for file in plan.files:
        totals[plan.process_of[file.device]] += file.size - file.header_bytes
    return totals
