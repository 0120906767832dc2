"""Every error that AcceptMoE raises on purpose; each text says what, got, allowed, next."""


class AcceptMoEError(Exception):
    """Base of all errors of this package."""


class InvalidArgumentError(AcceptMoEError, ValueError):
    """An argument has a value that is out of range or does not fit the others."""


class TableError(AcceptMoEError, ValueError):
    """A commitment table is unreadable, damaged, or made for something else."""


class TreeError(AcceptMoEError, ValueError):
    """A draft tree or tree shape is not a tree, or holds impossible numbers."""


class UnsupportedModelError(AcceptMoEError, ValueError):
    """The model's family or configuration cannot be wrapped."""


class UnsupportedGenerateError(AcceptMoEError, ValueError):
    """`generate` was called with a keyword or value that a wrapped model does not support."""


class DrafterError(AcceptMoEError, ValueError):
    """A drafter does not fit the target, or its files are damaged."""


class WrapStateError(AcceptMoEError, RuntimeError):
    """The model is already wrapped, or is not wrapped."""


class SelfCheckError(AcceptMoEError, RuntimeError):
    """The routing hook did not reproduce the model's own router at wrap time."""


class TargetError(AcceptMoEError, ValueError):
    """A bundled target is unknown, or was asked for in an impossible way."""


class KernelBuildError(AcceptMoEError, RuntimeError):
    """The compiled kernels could not be built or loaded on this machine."""
