"""Offer onnx_ir, which is imported when a name of it is first used: that takes a second, and few commands need it.

Annotations with its types stay in quotes, as they are not to be the first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_ir import *  # noqa: F403 - all that it offers
else:

    def __getattr__(name: str) -> object:
        import onnx_ir

        return getattr(onnx_ir, name)
