"""Import what the default engines run on: the fork server imports this module, so that no worker has to."""

import importlib

from enginesmith.pipeline.engines import DEFAULT, engine_class

for _name in DEFAULT:
    for _module in engine_class(_name).modules:
        importlib.import_module(_module)
