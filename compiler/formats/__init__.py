"""Number formats: how an array is written in few bits, with scales, and read again. Pure functions, and no mesh.

    element.py      one type of element, and the registry of all; each type is a file (integer.py, float8.py, ..)
    block.py        an array in blocks that share a scale: encode, decode, shapes, bytes

Weights (compiler/parallel/encodings.py), operands of matmuls and optimizer states are users of this one mechanism.
"""

from . import dynamic8, float4, float8, integer, nf4, root4  # each registers its types

__all__ = ["dynamic8", "float4", "float8", "integer", "nf4", "root4"]
