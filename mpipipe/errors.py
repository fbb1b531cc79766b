"""The errors that mpipipe raises, each a sentence that says what was wrong and what to do."""


class MpipipeError(RuntimeError):
    """Base of all errors raised by mpipipe; printed without a traceback when nobody catches it."""

    # Asks AutoGraph, by its own convention, not to wrap the error in one of another type where a step is traced.
    ag_pass_through = True


class ConfigError(MpipipeError):
    """A setting has a value that it cannot have."""


class EnvironmentProblem(MpipipeError):
    """The machine, the MPI library or the launcher is not what mpipipe needs."""


class DisagreementError(MpipipeError):
    """The ranks do not do the same: they built different models, or are at different places in the script.

    Every rank knows of it and raises it, so that only the server needs to print it.
    """


class NonFiniteError(MpipipeError):
    """A gradient is not finite, and the run is to end then."""


class ProtocolError(MpipipeError):
    """An event that cannot happen has happened: a fault of mpipipe, or of the network under it."""
