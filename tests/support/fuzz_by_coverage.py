"""The decoders under atheris, which looks for input that reaches new lines. No JAX.

python tests/support/fuzz_by_coverage.py -runs=100000
"""

import sys
from contextlib import suppress

import atheris  # pyright: ignore

with atheris.instrument_imports(include=["ostraka"]):  # pyright: ignore
    from ostraka.errors import OstrakaError
    from ostraka.layout.metadata import decode_metadata, metadata_is_intact
    from ostraka.layout.shard_file import decode_index, digest
    from ostraka.tree.json_tree import saved_tree

EXAMPLE = (
    b'{"format":"ostraka","version":1,"id":"0123456789abcdef","writer":{},"process_of":[[0,0,2]],'
    b'"tree":{"dict":["w","s"],"items":[0,{"int":7}]},"meshes":[{"axes":["x"],"shape":[2],'
    b'"devices":[[0,1,2]],"types":["auto"]}],"layouts":[{"grid":[2],"owners":[[0,1,2]]}],'
    b'"leaves":[{"path":"w","kind":"jax","dtype":"float32","shape":[8],"layout":0,"mesh":0,'
    b'"spec":[["x"]]}],"files":{"device":[[0,1,2]],"part":[[0,0,2]],"header_bytes":[[4096,0,2]],'
    b'"size":[[4112,0,2]]},"indexes":[],"user":{}'
)
INDEX = (
    b'{"files":{"shard_00000.safetensors":{"size":4112,"blocks":[[4096,-4080,2]],"digests":"'
    b'0123456789abcdef0123456789abcdef"}}}'
)


def read(data: bytes) -> None:
    if not data:
        return
    if data[0] % 2:
        with suppress(ValueError, RecursionError):
            decode_index(data[1:])
        return
    text = data[1:]
    sealed = text + b',"digest":"' + digest(text).encode() + b'"}\n'
    assert metadata_is_intact(sealed)
    with suppress(ValueError, OstrakaError):
        metadata = decode_metadata(sealed)
        saved_tree(metadata.tree, [leaf.spec.path for leaf in metadata.leaves])


if __name__ == "__main__":
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as directory:
        Path(directory, "metadata").write_bytes(b"\x00" + EXAMPLE)
        Path(directory, "index").write_bytes(b"\x01" + INDEX)
        atheris.Setup([*sys.argv, directory], read)
        atheris.Fuzz()
