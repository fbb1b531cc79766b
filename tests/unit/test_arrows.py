"""Which module may know of which: arrows point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import mpipipe

PACKAGE = Path(mpipipe.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """The full names of all modules and names that a file imports, wherever in it."""
    package = ["mpipipe", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def test_there_are_files_to_look_at():
    assert {"protocol/server.py", "transport/mpi.py", "keras/compat.py", "data.py", "link.py"} <= set(IDS)


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "protocol"], ids=lambda p: p.name)
def test_the_protocol_knows_nothing_of_ours_but_itself_and_the_errors_and_neither_clock_nor_threads(path):
    for name in imports(path):
        if within(name, "mpipipe"):
            assert within(name, "mpipipe.protocol", "mpipipe.errors")
        assert not within(name, "time", "datetime", "threading", "socket", "os", "random"), name
        assert not within(name, "numpy", "mpi4py", "tensorflow", "keras"), name


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_the_mpi_transport_and_the_context_know_mpi(path):
    if path.relative_to(PACKAGE).as_posix() not in ("transport/mpi.py", "context.py"):
        assert not [name for name in imports(path) if within(name, "mpi4py")]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_the_keras_side_and_data_know_tensorflow_and_keras(path):
    if path.relative_to(PACKAGE).parts[0] not in ("keras", "data.py"):
        assert not [name for name in imports(path) if within(name, "tensorflow", "keras", "mpipipe.keras")]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_compat_knows_the_inside_of_keras(path):
    if path.relative_to(PACKAGE).as_posix() == "keras/compat.py":
        return
    assert not [name for name in imports(path) if within(name, "keras.src")]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("keras", "src"), f"line {node.lineno}"


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name in ("transport", "wire")], ids=lambda p: p.name)
def test_transports_and_wire_formats_know_nothing_of_engines_and_sessions(path):
    for name in imports(path):
        if within(name, "mpipipe"):
            assert within(name, "mpipipe.protocol", "mpipipe.errors", "mpipipe.transport", "mpipipe.wire")


def test_measuring_the_link_knows_of_transports_only():
    ours = {name for name in imports(PACKAGE / "link.py") if within(name, "mpipipe")}
    assert ours and all(within(name, "mpipipe.transport.base") for name in ours)


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "timeline"], ids=lambda p: p.name)
def test_the_timeline_knows_of_the_marks_that_it_is_made_of_and_of_nothing_that_makes_them(path):
    for name in imports(path):
        if within(name, "mpipipe"):
            assert within(name, "mpipipe.timeline", "mpipipe.trace", "mpipipe.errors")


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules that are loaded in a new interpreter after it has imported some."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_everything_but_the_keras_side_is_imported_without_mpi_and_without_tensorflow():
    excepted = {PACKAGE / "transport" / "mpi.py", PACKAGE / "data.py"}
    files = [path for path in FILES if path.parent.name != "keras" and path not in excepted]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    modules = [name.removesuffix(".__init__") for name in names]
    assert {"mpipipe", "mpipipe.protocol.server", "mpipipe.engine", "mpipipe.context", "mpipipe.session"} <= set(
        modules
    )
    loaded = loaded_by(*modules)
    assert "mpipipe" in loaded and not loaded & {"mpi4py", "tensorflow", "keras", "matplotlib"}
