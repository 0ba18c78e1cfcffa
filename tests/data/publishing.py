"""Publishes an entry of a shared store; as a script, in a process that begins when it is told to.

It reads a line of JSON with a ``url``, the ``cache`` and the ``environment``, opens the store and says ``ready``; reads
another one with the ``content`` and the number of ``files``, publishes, and says which content stands.
"""

import json
import os
import sys

from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.store.store import Store

KEY = "ab" * 32
_HISTORY = (HistoryEntry(step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made"),)


def publish(store: Store, content: bytes, files: int = 1) -> Artifact:
    """An entry with so many files beside its content."""
    with store.workspace() as folder:
        (folder / "model.onnx").write_bytes(content)
        for number in range(files):
            (folder / f"{number}.bin").write_bytes(b"%d" % number)
        return store.publish(KEY, folder, kind="onnx", file="model.onnx", signature=None, history=_HISTORY)


def main() -> None:
    """Run as a script."""
    import s3fs  # noqa: F401  (before it is told to begin: that takes a while)

    place = json.loads(sys.stdin.readline())
    os.environ |= {**place["environment"], "ENGINESMITH_CACHE": place["cache"]}
    store = Store(place["url"])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wanted = json.loads(sys.stdin.readline())
    sys.stdout.write(publish(store, wanted["content"].encode(), wanted["files"]).path.read_text())


if __name__ == "__main__":
    main()
