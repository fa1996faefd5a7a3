"""The errors that ShardLite raises on purpose. Each says who, what was got, and what was expected or what to do."""


class ShardLiteError(Exception):
    """Base of every error below: `except ShardLiteError` catches what the library itself found wrong."""


class LayoutError(ShardLiteError, ValueError):
    """The caller's shapes, dtypes, models or calls do not fit."""


class PhaseError(ShardLiteError, RuntimeError):
    """An illegal move of a state, for example a gradient that comes after its unit was reduced."""


class CommError(ShardLiteError, RuntimeError):
    """A peer failed, is late, or does something else than this rank.

    The buffers of the operation hold undefined values afterwards, and the connection to the peer may be closed for
    good: end the run and let `torchrun` restart it.
    """


class DesyncError(CommError):
    """Ranks do different things: another pass, another number of steps. Found by comparison, before data were mixed."""


class EscapedViewWarning(UserWarning):
    """A view of gathered weights outlived their use. The result is right, but the memory is not ours to reuse."""


class NonFiniteWarning(UserWarning):
    """Gradients had a NaN or an infinity."""


class ShardWarning(UserWarning):
    """A value was computed from a shard, which is a part of a parameter, as if it were the whole one."""


class NonFiniteError(ShardLiteError, ArithmeticError):
    """Too many steps in a row were left out because gradients had a NaN or an infinity."""
