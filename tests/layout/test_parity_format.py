"""What `_METADATA` says of parity: to JSON and back, and what it must fulfil."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostraka
from fuzz import seal
from ostraka.errors import Damaged
from ostraka.layout.metadata import decode_metadata, encode_metadata
from ostraka.layout.parity_file import (
    Parity,
    ParityFile,
    check_parity_table,
    decode_parity,
    encode_parity,
    encode_parity_header,
    layouts_of,
)
from ostraka.layout.plan_parity import plan_parity
from ostraka.layout.shard_file import FileEntry


@given(
    st.lists(st.integers(4096, 1 << 40), min_size=1, max_size=40),
    st.integers(1, 2),
    st.integers(1, 9),
)
def test_there_and_back(sizes: list[int], count: int, processes: int) -> None:
    files = [FileEntry(n, n % 2, 4096, size) for n, size in enumerate(sizes)]
    process_of = [n % processes for n in range(len(files))]
    planned = plan_parity(files, process_of, range(processes), count=count)
    indexes = {process: 1000 + process for process in set(process_of)}
    groups = tuple(group.members for group in planned.groups)
    layouts = layouts_of(groups, files, process_of, indexes)
    assert sorted(p for layout in layouts for p, _ in layout.indexes) == sorted(indexes)
    table = Parity(
        count,
        groups,
        tuple(
            ParityFile(g, n, process, layouts[g].header_bytes, layouts[g].size, f"{g:08}{n:08}")
            for g, group in enumerate(planned.groups)
            for n, process in enumerate(group.writers)
        ),
    )
    assert decode_parity(json.loads(json.dumps(encode_parity(table)))) == table
    check_parity_table(table, files, process_of, indexes)
    for group, layout in enumerate(layouts):
        members = [files[row] for row in groups[group]]
        header = encode_parity_header((group, 0), members, layout, "0" * 16, version=1)
        assert len(header) == layout.header_bytes
        assert layout.size == sum(layout.lengths) + layout.table_bytes


HARM = {
    "no count": lambda p: p.pop("count"),
    "three sums": lambda p: p.update(count=3),
    "a text for a count": lambda p: p.update(count="1"),
    "a row that is not there": lambda p: p.update(members=[[0, 1, 7], [99, 0, 1]]),
    "a row below 0": lambda p: p.update(members=[[-1, 1, 8]]),
    "a row twice": lambda p: p.update(members=[[0, 0, 8]]),
    "too few rows": lambda p: p.update(members=[[0, 1, 7]]),
    "too many rows": lambda p: p.update(members=[[0, 1, 9]]),
    "an empty group": lambda p: p.update(lengths=[[8, -8, 2]]),
    "endless groups": lambda p: p.update(lengths=[[1, 0, 1 << 40]]),
    "another size": lambda p: p.update(size=[[5000, 0, 1]]),
    "a huge header": lambda p: p.update(header_bytes=[[1 << 50, 0, 1]]),
    "no header": lambda p: p.update(header_bytes=[[0, 0, 1]]),
    "no process": lambda p: p.update(process=[[-1, 0, 1]]),
    "half a digest": lambda p: p.update(digests="12345678"),
    "two digests": lambda p: p.update(digests="0" * 32),
    "a number for digests": lambda p: p.update(digests=5),
    "runs that are none": lambda p: p.update(members={"a": 1}),
}


TABLES: dict[str, Any] = {str(table): table for table in (None, 5, "text", [], {}, {"count": {}})}


@pytest.mark.parametrize("kind", [*HARM, *TABLES])
def test_contradictions_are_damage(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "_METADATA"
    ostraka.save(tmp_path, {str(n): np.full((64, 64), n) for n in range(8)}, parity=1)
    data = path.read_bytes()
    assert encode_metadata(decode_metadata(data)) == data
    body = json.loads(data)
    del body["digest"]
    if kind in HARM:
        HARM[kind](body["parity"])
    else:
        body["parity"] = TABLES[kind]
    path.write_bytes(seal(json.dumps(body).encode()))
    with pytest.raises(Damaged, match="it contradicts itself"):
        ostraka.open(tmp_path)
