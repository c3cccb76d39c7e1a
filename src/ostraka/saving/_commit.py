"""The last stage of a save: all or nothing."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import astuple, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import jax

from ostraka._version import __version__
from ostraka.common.record import summarize, timeline
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import TooLarge
from ostraka.layout import shard_file
from ostraka.layout.metadata import Metadata, encode_metadata
from ostraka.layout.plan_write import WritePlan
from ostraka.processes.operation import ProcessFailed
from ostraka.saving._write import Companion, WrittenFiles, metadata_of
from ostraka.saving.agree import Agreed, RunningSave
from ostraka.storage import Store

_LOOKERS = 16


def commit(
    save: RunningSave,
    agreed: Agreed,
    plan: WritePlan,
    written: WrittenFiles,
    companions: Sequence[Companion],
) -> list[float]:
    """Finish the companions, report this process's files, and commit if all have reported well.

    Returns the bytes and seconds of all processes, summarized.
    """
    operation, place, watch = save.operation, save.place, save.watch

    def decide(reports: list[Any]) -> list[float]:
        by_process = list(map(itemgetter("written"), reports))
        summary = summarize(by_process)
        writer = {
            "ostraka": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "hosts": list(agreed.host_names),
            "timeline": timeline(watch, summary, by_process),
        }
        files = list(map(itemgetter("files"), reports))
        user = save.options.metadata or {}
        metadata = metadata_of(
            plan, agreed.save_id, files, writer=writer, tree=agreed.tree, user=user
        )
        if operation.count > 1:
            _check_visible(place.store, metadata)
        for companion in companions:
            rows = [row for report in reports for row in report[companion.name]]
            metadata = replace(metadata, **{companion.name: companion.describe(rows)})
        directory = shard_file.shards_directory(metadata.id)
        copy = f"{directory}/{shard_file.METADATA_COPY}" if metadata.files else ""
        place.commit(encode_metadata(metadata), metadata.file_sizes(), copy)
        return summary

    nbytes, seconds = sum(written.sizes), watch.phases["write"]
    mine: dict[str, Any] = {"files": written.report(plan)}
    for companion in companions:
        files = companion.finish(operation, place.store, agreed.save_id, written)
        seconds += watch.lap(companion.name)
        mine[companion.name] = list(map(astuple, files))
        nbytes += sum(file.size for file in files)
    mine["written"] = [nbytes, seconds]
    return operation.exchange("commit", mine, decide, is_last=True)


def _check_visible(store: Store, metadata: Metadata) -> None:
    """Process 0 must see what the others wrote, or the checkpoint would be in pieces."""

    def look(process: int) -> None:
        expected = metadata.indexes[process]
        name = f"{shard_file.shards_directory(metadata.id)}/{shard_file.index_name(process)}"
        try:
            seen = shard_file.digest(store.get(name, expected.size)) == expected.digest
        except (FileNotFoundError, TooLarge):
            seen = False
        if not seen:
            raise ProcessFailed(
                process,
                f"process 0 can't see what it wrote ({store.location}/{name}): all "
                "processes must save to one shared file system",
            )

    others = [process for process in metadata.indexes if process != 0]
    run_all(look, others, threads=_LOOKERS, stop=StopSignal())
