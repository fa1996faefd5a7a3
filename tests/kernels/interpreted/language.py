"""Skip two redundant operations of the interpreter, which halves the time of these tests."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


@cache
def quicken():
    """Leave them out from now on.

    Builtins of the language are patched once. The interpreter does it at each launch and at each call of a device
    function, and undoes it at the end of a launch, when that of another thread may go on.

    Sums are not computed a second time in 64 bits. Compilers do not, either, unless they are told to look for
    overflows; the interpreter does it always, and looks at the result only then.
    """
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    nothing = type(interpreter._patch_lang(everything))
    interpreter._patch_lang = lambda function: nothing()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
