"""The JSON documents that pages, the terminal and `--json` show. Pure.

A page shows one or several documents: a run, a checkpoint, a comparison or a plan. All sizes are in
bytes, times in seconds, and points in time in seconds since 1970. NaN and infinity are the strings
`"nan"`, `"inf"` and `"-inf"`. A field is None if its value is unknown or does not apply.

Tables with a row per leaf or file are stored by column, so that 100,000 rows stay small. A column
of texts that repeat is stored as `Coded`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

SCHEMA = 1
"""It grows if a field changes its meaning or goes away. New fields do not change it."""

Number = float | int | Literal["nan", "inf", "-inf"]
StepState = Literal["committed", "verified", "damaged", "forbidden", "unsupported"]
"""`committed`: all files are listed with their sizes. `verified`: all bytes were read as well."""
FileState = Literal["present", "verified", "missing", "damaged", "unread"]
"""`present`: listed with its size. `unread`: nobody looked."""


class Coded(TypedDict):
    """A column of texts: the distinct texts, and for each row the number of its text, or -1."""

    texts: list[str]
    codes: list[int]


class Totals(TypedDict):
    """The arrays of a checkpoint together, each counted once however many paths it has."""

    arrays: int
    leaves: int
    """Paths, with values that are no arrays."""
    elements: int
    parameters: int
    bytes: int
    """The bytes of the elements."""
    stored_bytes: int
    """The bytes of the files, with parity."""
    files: int


class Saved(TypedDict):
    """Who saved a checkpoint, when, and how long it took."""

    at: float | None
    text: str
    """`2026-11-18 10:00:00 UTC by ostraka 0.1.0 with jax 0.10.2`."""
    hosts: list[str]
    """The host of each process."""
    phases: dict[str, float]
    """The seconds of each phase on process 0, in order: wait, capture, agree, plan, write, …"""
    blocked_s: float | None
    """How long the loop waited."""
    background_s: float | None
    """How long the save went on in the background."""
    process_bytes: list[int]
    """The bytes that each process wrote. Empty if unknown."""
    process_s: list[float]
    """How long each process wrote. Empty if unknown."""


# A run


class RunStep(TypedDict):
    """One step of a run."""

    step: int
    path: str
    saved_at: float | None
    bytes: int | None
    state: StepState
    format: Literal["ostraka", "orbax"]
    pinned: bool
    best: list[str]
    """The metrics by which no other step is better."""
    mirrored: bool | None
    """None without a mirror."""
    held: int
    """The number of readers that hold it."""
    goes_next: bool
    """True if retention deletes it after the next save."""
    metrics: dict[str, Number]
    groups: dict[str, int] | None
    """Bytes by group: parameters, optimizer, other. None if its metadata can't be read."""
    blocked_s: float | None
    """How long its save blocked the loop."""
    background_s: float | None
    """How long its save then went on in the background."""
    problems: list[str]


class RunDocument(TypedDict):
    """A directory of steps."""

    schema: int
    kind: Literal["run"]
    path: str
    at: float
    """When it was looked at."""
    steps: list[RunStep]
    """Ascending."""
    bytes: int
    metrics: dict[str, dict[str, Any]]
    """By name: `better` ("low", "high" or None), `best_step`, `latest`."""
    rules: dict[str, Any] | None
    """The Manager's arguments about when to save, what to keep and what to mirror, as `_RUN` has
    them, and the same in words: `saves`, `keeps`. None if no Manager said."""
    writer: dict[str, Any] | None
    """The Manager that writes: `host`, `pid`, `since`, and `is_running`: True, or None if only its
    own host could tell. None if there is none."""
    advice: dict[str, Any] | None
    """The fields of `ostraka.Advice` as the Manager last wrote them, and the same in words: `text`.
    """
    mirror: dict[str, Any] | None
    """`path`, `steps` (how many have a copy), `newest` (of those), `waiting` (steps without a
    copy), `lag_s` (the age of the oldest of them), `problem`. The Manager says so: the mirror
    itself is not looked at."""
    space: dict[str, Any] | None
    """`free_bytes`, `total_bytes`, `saves_left`. None for buckets."""
    notes: list[str]
    """Sentences about what is unknown or needs attention."""


# A checkpoint


class Mesh(TypedDict):
    """A mesh of the run that saved."""

    axes: dict[str, int]
    """The size of each axis, in order. Empty for a single device."""
    devices: list[list[int]]
    """The device numbers in row-major order, as runs `[start, step, count]`."""


class Placement(TypedDict):
    """How arrays were sharded."""

    mesh: int
    """A row in `meshes`, or -1 for the memory of hosts."""
    spec: list[list[str]]
    """For each dimension the mesh axes that it is sharded along. Missing ones are whole."""


class LeafTable(TypedDict):
    """The leaves of a checkpoint in tree order, by column."""

    path: list[str]
    dtype: Coded
    """For values that are no arrays, their type."""
    shape: list[list[int] | None]
    """None for values that are no arrays."""
    bytes: list[int]
    """0 if an earlier path has the same array."""
    group: Coded
    """parameters, optimizer or other."""
    sharding: Coded
    """In words, such as `P('fsdp', None)`."""
    placement: list[int]
    """A row in `placements`, or -1 if it is unknown or the leaf is no array."""
    same_as: dict[str, int]
    """By row number: the first row with the same array."""
    values: dict[str, str]
    """By row number: the text of a value that is no array."""


class LeafBox(TypedDict):
    """A stored slice of a leaf."""

    box: list[list[int]]
    """Start and stop along each dimension."""
    file: int
    """The row in `FileTable`, or -1."""
    name: str | None
    """The name of the stored slice if it is not a file of its own, as in OCDBT."""
    offset: int | None
    """Where it begins in its file. None if nobody worked it out."""
    bytes: int
    stored_bytes: int
    """Fewer than `bytes` if it is compressed."""


class LeafValues(TypedDict):
    """The values of an array, which were read and verified.

    `least` and `most` leave out NaN. `mean`, `std`, `norm` and `histogram` leave out infinity too.
    Of complex numbers they count the magnitudes.
    """

    count: int
    least: Number | None
    most: Number | None
    mean: Number | None
    std: Number | None
    norm: Number | None
    """The square root of the sum of squares."""
    nan: int
    infinite: int
    zero: int
    histogram: dict[str, Any] | None
    """`counts` of equal bins from `low` to `high`. None without a finite value."""
    slice: dict[str, Any] | None
    """`index`, such as `[0, :8, :8]`, `shape`, and `values`: the first elements, nested."""
    problem: str | None
    """Why they could not be read. Then the numbers mean nothing."""


class LeafDetails(TypedDict):
    """One array in full."""

    path: str
    placement: Placement
    grid: list[int]
    """The number of stored slices along each dimension."""
    boxes: list[LeafBox]
    """The first slices, in row-major order."""
    boxes_in_all: int
    problem: str | None
    """Why the slices could not be listed."""
    values: LeafValues | None
    """None if they were not read."""


class FileTable(TypedDict):
    """The files of a checkpoint, by column: those with arrays first, then parity and the others."""

    name: list[str]
    bytes: list[int]
    kind: Coded
    """shard, parity, index or metadata."""
    process: list[int | None]
    host: Coded
    state: Coded
    """A `FileState`."""
    problem: dict[str, str]
    """By row number: what is wrong."""


class ParityGroups(TypedDict):
    """The parity of a checkpoint."""

    count: int
    """The parity files of each group: it takes the loss of as many files."""
    groups: list[list[int]]
    """The members of each group, then its parity files, as rows in `FileTable`."""


class Integrity(TypedDict):
    """What is known about the files."""

    state: StepState
    read: bool
    """True if all bytes were read and compared."""
    has_checksums: bool
    problems: list[str]
    parity: ParityGroups | None
    restorable: bool | None
    """For a damaged checkpoint: True if parity covers all damage."""
    verify: str | None
    """The command that reads and compares every byte, if that was not done."""
    repair: str | None
    """The command that repairs it."""


class Places(TypedDict):
    """The bytes of the elements by where they are stored."""

    unit: Literal["host", "process", "file"]
    bytes: dict[str, dict[str, int]]
    """By host, process or file, and by the first names of the tree."""


class ValuesRead(TypedDict):
    """Which values a document has."""

    read: bool
    arrays: int
    """The number of arrays whose values were read."""
    command: str | None
    """The command that reads them, if they were not read."""


class CheckpointDocument(TypedDict):
    """One checkpoint of any format."""

    schema: int
    kind: Literal["checkpoint"]
    path: str
    format: Literal["ostraka", "orbax", "safetensors"]
    separator: str
    """Between the names in a path: `/`, or `.` for tensors of files."""
    id: str
    step: int | None
    metrics: dict[str, Number]
    pinned: bool
    saved: Saved
    totals: Totals
    groups: dict[str, int]
    """Bytes by group."""
    dtypes: dict[str, int]
    """Bytes by dtype."""
    hosts: dict[str, int]
    """Stored bytes by host. Empty if the hosts are unknown."""
    places: Places
    meshes: list[Mesh]
    placements: list[Placement]
    process_of: list[list[int]]
    """The process of each device number, as runs `[start, step, count]`."""
    processes: int | None
    devices: int | None
    leaves: LeafTable
    files: FileTable
    integrity: Integrity
    values: ValuesRead
    details: dict[str, LeafDetails]
    """By row number, the largest arrays first, as many as fit. A board fetches the others."""
    notes: list[str]


# A comparison


class ComparisonTable(TypedDict):
    """The leaves of two checkpoints, by column. Norms have four digits."""

    layer: Coded
    """The row in the heat map, the beginning of the path: the block, such as `model/blocks/3`, or a
    name beside the blocks. The texts are in the order of the model."""
    name: Coded
    """The rest of the path, behind the separator. Empty if the layer is the leaf itself."""
    role: Coded
    """The column: q, k, v, o, up, down, norm, embedding, bias, … The texts are in the order of the
    columns."""
    group: Coded
    """parameters, optimizer or other. Values that are no arrays are other."""
    state: Coded
    """`the same`, `only in a`, `only in b`, or the aspects that differ with commas: kind, shape,
    dtype, same_as, sharding, value."""
    shape: Coded
    """As `4 × 2`, or `()`. -1 for values that are no arrays."""
    equal: list[int | None]
    """Elements that are equal in both. None if they were not compared."""
    norm_a: list[Number | None]
    """The square root of the sum of squares. None for integers, keys, and leaves without a partner
    of the same shape."""
    norm_b: list[Number | None]
    norm_delta: list[Number | None]
    """The norm of b - a. The relative change is norm_delta / norm_a, and infinite if only norm_a is
    0: such a leaf is new."""
    nan: dict[str, int]
    """By row number: NaN and infinite elements in b, where there are any."""
    same_as: list[int]
    """The rows of arrays that an earlier row has, too. Sums leave them out."""
    flag: dict[str, str]
    """By row number: nan, exploding, dead or frozen, where there is a flag."""


class ComparisonFlag(TypedDict):
    """Something that a person should look at, in one layer."""

    flag: Literal["nan", "exploding", "dead", "frozen"]
    """The worst first.

    nan: b has NaN, or more infinities than a.
    exploding: a parameter whose norm is more than ten times that of a; or more than twice, with a
    relative change above 0.5 and above 30 times the median of all parameters that moved. In both
    cases its elements are, on average of squares, more than three times as large as those of all
    parameters in a. So biases, and other leaves that start near zero, may grow.
    dead: a parameter whose norm fell below a thousandth of that of a.
    frozen: a parameter without any change, while at least half of the parameters changed."""
    layer: str
    path: str
    """The first leaf with it, or the one that changed most."""
    leaves: int
    """The leaves of the layer that have it."""
    why: str
    steps: list[int] | None
    """The pair of steps. None between a and b."""


class ComparisonAlong(TypedDict):
    """The parameters along a run, between each step and the next. NaN and infinity are strings."""

    pairs: list[list[int]]
    """The two steps of each pair, in order. Usually a pair begins where the one before ends."""
    layers: list[str]
    relative: list[list[Number | None]]
    """For each layer, the relative change of each pair of steps. None if it has no such leaf."""
    roles: list[str]
    cells: list[list[int]]
    """The numbers of a layer and of a role."""
    by_role: list[list[Number | None]]
    """For each of `cells`, the relative change of each pair of steps. Both are empty if there were
    too many."""
    flags: list[ComparisonFlag]
    """Those of each pair of steps, of a layer the first only."""


class ComparisonDocument(TypedDict):
    """Two checkpoints, or the first and the last step of a run and the steps between them."""

    schema: int
    kind: Literal["comparison"]
    a: dict[str, Any]
    """`path`, `step`, `saved_at`."""
    b: dict[str, Any]
    same: bool
    counts: dict[str, int]
    """Leaves by state."""
    separator: str
    """The character between the names of a path."""
    moved: list[int]
    """How many parameters changed, and how many were compared."""
    leaves: ComparisonTable
    flags: list[ComparisonFlag]
    """The worst first. Empty if nothing stands out."""
    along: ComparisonAlong | None
    """Along a whole run. None for two checkpoints."""
    notes: list[str]


# A plan


class PlanNumbers(TypedDict):
    """The numbers of a planned checkpoint."""

    plan: dict[str, Any]
    """The document of `ostraka plan --json`."""
    hosts: list[int]
    """All hosts, or evenly chosen ones if there are many."""
    host_bytes: list[int]
    """The bytes that each of `hosts` writes."""
    file_bytes: dict[str, Any]
    """A histogram of file sizes: `edges`, which are powers of two, and `counts`."""


class PlanChoice(TypedDict):
    """The same checkpoint on another mesh, or in another dtype."""

    mesh: int
    """The number of its mesh in the variant."""
    dtype: int
    numbers: PlanNumbers


class PlanVariant(TypedDict):
    """A planned checkpoint."""

    name: str
    inputs: dict[str, Any]
    """The options: `source`, `hosts`, `optimizer`, `rules`, `parity`, `bandwidths`, …"""
    meshes: list[dict[str, int]]
    """The mesh as given, and meshes near it."""
    dtypes: list[str]
    """The dtype as given, and others."""
    numbers: PlanNumbers
    """Those of the first mesh and the first dtype."""
    choices: list[PlanChoice]
    """Those of the others, as far as they can be planned."""


class PlanDocument(TypedDict):
    """One planned checkpoint, or several side by side."""

    schema: int
    kind: Literal["plan"]
    title: str
    variants: list[PlanVariant]
    comparison: list[dict[str, Any]]
    """The rows of `ostraka plan --compare`."""
    contests: list[list[str]]
    """The key and the name of each number that is better when smaller."""
    assumed: dict[str, Any]
    """Bandwidths in bytes a second, the mean time between failures and the number of checkpoints to
    keep, for a page whose plan was asked for without."""


Document = RunDocument | CheckpointDocument | ComparisonDocument | PlanDocument


class Page(TypedDict):
    """The contents of a page."""

    title: str
    at: float
    """When it was made."""
    documents: list[Document]
    live: dict[str, Any] | None
    """On a board: the addresses of its documents and events. None in a file."""
