"""Plans as a document: one, or several side by side, with the choices of the page. No JAX."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import floor, log2
from typing import Any

from ostraka.errors import OstrakaError
from ostraka.layout.spec import MeshSpec
from ostraka.planner import Plan
from ostraka.planner.report import CONTESTS, compare_plans, describe_plan
from ostraka.planner.sources import plan_source
from ostraka.planner.state import PlanOptions, mesh_of_sizes
from ostraka.planner.time import Bandwidths
from ostraka.report.schema import SCHEMA, PlanChoice, PlanDocument, PlanNumbers, PlanVariant

ASSUMED = Bandwidths(host_write=2e9, host_read=2e9, device=20e9)
"""Bandwidths of the page where none are given. It says that they are assumed."""
ASSUMED_MTBF_S = 12 * 3600.0
ASSUMED_KEEP = 3

_MOST_CHOICES = 14
"""Plans beside those asked for, of all variants together."""
_MOST_CHOICES_S = 30.0
_MOST_HOSTS = 64
_DTYPES = ("bfloat16", "float32")
_CHANGED_AXES = 2


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """A checkpoint to plan, and the questions about it."""

    source: str
    options: PlanOptions
    bandwidths: Bandwidths
    onto: Sequence[MeshSpec] = ()
    onto_hosts: int | None = None
    keep: int | None = None
    mtbf_s: float | None = None
    max_file: int | None = None
    max_host_memory: int | None = None


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The plan that answers a question, and its document."""

    question: PlanQuestion
    plan: Plan
    document: dict[str, Any]
    """The document of `ostraka plan --json`."""


def answer_plan(question: PlanQuestion) -> PlanAnswer:
    """Plan a checkpoint. Raises ValueError or OstrakaError if that can't be."""
    planned = plan_source(question.source, question.options)
    document = describe_plan(
        planned,
        question.bandwidths,
        onto=question.onto,
        onto_hosts=question.onto_hosts,
        keep=question.keep,
        mtbf_s=question.mtbf_s,
        max_file=question.max_file,
        max_host_memory=question.max_host_memory,
    )
    return PlanAnswer(question, planned, document)


def describe_plans(title: str, answers: Mapping[str, PlanAnswer]) -> PlanDocument:
    """The document of some plans, by name, with plans for other meshes and dtypes beside them."""
    ends = time.monotonic() + _MOST_CHOICES_S
    most = _MOST_CHOICES // len(answers)
    return {
        "schema": SCHEMA,
        "kind": "plan",
        "title": title,
        "variants": [
            _describe_variant(name, answer, most, ends) for name, answer in answers.items()
        ],
        "comparison": compare_plans({name: answer.document for name, answer in answers.items()})
        if len(answers) > 1
        else [],
        "contests": [[key, contest] for key, contest in CONTESTS],
        "assumed": {**asdict(ASSUMED), "mtbf_s": ASSUMED_MTBF_S, "keep": ASSUMED_KEEP},
    }


def _describe_variant(name: str, answer: PlanAnswer, most: int, ends: float) -> PlanVariant:
    question, options = answer.question, answer.question.options
    meshes, dtypes = [*_meshes_near(options.mesh)], _dtypes_near(answer)
    choices: list[PlanChoice] = []
    # Those that differ in one thing come before those that differ in two.
    numbers = sorted(product(range(len(meshes)), range(len(dtypes))), key=lambda at: (all(at), at))
    for mesh, dtype in numbers[1 : most + 1]:
        if time.monotonic() > ends:
            break
        chosen = _change(options, meshes[mesh] if mesh else None, dtypes[dtype] if dtype else None)
        try:
            found = answer_plan(replace(question, options=chosen, onto=(), onto_hosts=None))
        except (OstrakaError, ValueError, TypeError):
            continue  # It does not fit this state. The page does not offer it.
        choices.append({"mesh": mesh, "dtype": dtype, "numbers": _numbers_of(found)})
    return {
        "name": name,
        "inputs": {
            "source": question.source,
            "hosts": options.hosts,
            "optimizer": options.optimizer,
            "optimizer_dtype": options.optimizer_dtype,
            "rules": options.rules,
            "parity": options.parity,
            "compress": options.compress,
            "bandwidths": asdict(question.bandwidths),
            "keep": question.keep,
            "mtbf_s": question.mtbf_s,
        },
        "meshes": meshes,
        "dtypes": dtypes,
        "numbers": _numbers_of(answer),
        "choices": choices,
    }


def _numbers_of(answer: PlanAnswer) -> PlanNumbers:
    sizes = answer.plan.bytes_by_process
    every = max((len(sizes) - 1) / max(_MOST_HOSTS - 1, 1), 1.0)
    hosts = sorted({round(n * every) for n in range(min(len(sizes), _MOST_HOSTS))})
    return {
        "plan": answer.document,
        "hosts": hosts,
        "host_bytes": [sizes[host] for host in hosts],
        "file_bytes": _histogram([*answer.plan.files.values()]),
    }


def _histogram(sizes: Sequence[int]) -> dict[str, Any]:
    """The number of files between powers of two."""
    if not sizes:
        return {"edges": [], "counts": []}
    powers = [floor(log2(max(size, 1))) for size in sizes]
    low, high = min(powers), max(powers)
    counts = [0] * (high - low + 1)
    for power in powers:
        counts[power - low] += 1
    return {"edges": [2**power for power in range(low, high + 2)], "counts": counts}


# Other meshes and dtypes


def _meshes_near(mesh: MeshSpec | None) -> Iterator[dict[str, int]]:
    """The mesh itself, and with half or twice the size of one of its first axes."""
    if mesh is None:
        yield {}
        return
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    yield sizes
    for axis in mesh.axis_names[:_CHANGED_AXES]:
        if sizes[axis] % 2 == 0:
            yield {**sizes, axis: sizes[axis] // 2}
        yield {**sizes, axis: sizes[axis] * 2}


def _dtypes_near(answer: PlanAnswer) -> list[str]:
    """The dtype of most bytes, and the usual others."""
    totals: dict[str, int] = {}
    for group in answer.document["groups"].values():
        for dtype, size in group["dtypes"].items():
            totals[dtype] = totals.get(dtype, 0) + size
    given = answer.question.options.dtype
    own = given if isinstance(given, str) else max(totals, key=totals.__getitem__, default="")
    return [own, *(dtype for dtype in _DTYPES if dtype != own)]


def _change(options: PlanOptions, mesh: dict[str, int] | None, dtype: str | None) -> PlanOptions:
    """The same options on another mesh, with as many devices on a host, or in another dtype."""
    if dtype is not None:
        options = replace(options, dtype=dtype)
    if mesh is None:
        return options
    wanted, hosts = mesh_of_sizes(mesh), options.hosts
    if hosts is not None and options.mesh is not None:
        hosts = max(hosts * len(wanted.devices) // len(options.mesh.devices), 1)
    return replace(options, mesh=wanted, hosts=hosts)
