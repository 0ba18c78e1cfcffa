"""What the fork server imports, so that no worker has to; one that is broken is left for the worker to stumble over."""

import contextlib
import importlib
import os

VARIABLE = "ENGINESMITH_PRELOAD"

for _name in os.environ.get(VARIABLE, "").split():
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
