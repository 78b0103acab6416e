"""Values of options for tests and their programs."""

from hvd_adpsgd.config import Config


def another(name: str) -> object:
    """A value of the option that is not the default."""
    declared = Config.__dataclass_fields__[name]
    option = declared.metadata["option"]
    words = [*reversed(option.choices), "random_ring", "0123456789abcdef"]
    found = words if option.kind is str else map(option.kind, (3, 100, 0.5))
    return next(v for v in found if v != declared.default and option.allows(v))
