"""Each tensor that the library makes names its device: torch.set_default_device is the script's own."""

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2] / "hvd_adpsgd"
FACTORIES = {factory.__name__ for factory in _device_constructors()}
APART = "tools"  # programs of their own, which set no default


def unnamed(source: str) -> Iterator[int]:
    """Lines with a call of a factory of torch that names no device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("torch"), attr=factory), keywords=keywords
            ) if factory in FACTORIES and "device" not in {each.arg for each in keywords}:
                yield node.lineno


def test_every_factory_names_the_device() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != APART
        for line in unnamed(path.read_text())
    ]
    assert found == []
