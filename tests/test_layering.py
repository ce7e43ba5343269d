"""The architecture, as a test: who may import whom, and how long a piece of code may get.

Every check here also has a counterpart that feeds it a breach, so that none of them can pass
because it looks at nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OURS = {"cuda_ckpt", "libtimeslice", "tsliced", "demo", "bench", "tests"}

#: What ring 0 may use of the standard library: data types and nothing that can do input or output.
CORE_MAY_IMPORT = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "typing",
}
#: Randomness comes in as an argument, so its type may be named; nothing here may make one.
CORE_MAY_NAME = {"random.Random"}

RING_1 = (
    "codec",
    "config",
    "ctl",
    "doctor",
    "driver",
    "exporting",
    "host",
    "neighbours",
    "net",
    "observe",
    "qualifying",
    "rescue",
    "reserving",
)
RING_2 = ("tsliced.daemon", "tsliced.reloading", "tsliced.__main__")

#: What does a command's work where no daemon does it; it is loaded when it is asked for.
LOADED_LATE = ("tsliced.doctor", "tsliced.observe", "tsliced.rescue")

LIMIT_OF_MODULE = 700
LIMIT_OF_FUNCTION = 60


@dataclass(frozen=True)
class Import:
    """One imported module, dotted, and how it is imported."""

    module: str
    line: int
    for_typing: bool = False
    at_load: bool = True

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(f"{package}.")


def python_files(*parts: str) -> list[Path]:
    """Returns the Python files at ``parts``, each a directory or a module without its ending."""
    found: list[Path] = []
    for part in parts:
        path = ROOT / part
        found += sorted(path.rglob("*.py")) if path.is_dir() else []
        found += [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else []
    return found


def imports_of(source: str) -> list[Import]:
    """Returns every import of a module's source, also those inside functions."""
    return list(_imports_in(ast.parse(source), for_typing=False, at_load=True))


def _imports_in(node: ast.AST, *, for_typing: bool, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        typing_here = for_typing or _is_type_checking(child)
        load_here = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, typing_here, load_here)
        elif isinstance(child, ast.ImportFrom):
            # `from package import name` may name a module, so the name belongs to the path.
            module = "." * child.level + (child.module or "")
            for alias in child.names:
                yield Import(f"{module}.{alias.name}", child.lineno, typing_here, load_here)
        else:
            yield from _imports_in(child, for_typing=typing_here, at_load=load_here)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def breaches_of_core(source: str) -> list[str]:
    """Returns what reaches outside ring 0 in a core module: imports, and randomness of its own."""
    found = []
    for imported in imports_of(source):
        top = imported.module.partition(".")[0]
        inside = imported.is_of("tsliced.core") or top in CORE_MAY_IMPORT
        if not inside and imported.module not in CORE_MAY_NAME:
            found.append(imported.module)
    return found + calls_of(source, "Random")


def breaches_of_independence(source: str, package: str) -> list[str]:
    """Returns the imports of ours, other than the package itself."""
    return [
        imported.module
        for imported in imports_of(source)
        if (top := imported.module.partition(".")[0]) in OURS and top != package
    ]


def breaches_of_rings(source: str) -> list[str]:
    """Returns the imports that point outwards, from ring 1 to ring 2."""
    return [
        imported.module
        for imported in imports_of(source)
        if any(imported.is_of(module) for module in RING_2)
    ]


def calls_of(source: str, *names: str) -> list[str]:
    """Returns the calls of functions of these names, however qualified, as source text."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in names)
            or (isinstance(node.func, ast.Attribute) and node.func.attr in names)
        )
    ]


def loads_libcuda(source: str) -> list[str]:
    """Returns the calls that load a library by a name, constant or variable, with cuda in it."""
    calls = calls_of(source, "CDLL", "PyDLL", "LoadLibrary", "find_library", "dlopen")
    return [call for call in calls if "cuda" in call.lower()]


def long_functions(source: str) -> list[str]:
    """Returns the functions of a module that are longer than the limit, with their lengths."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LIMIT_OF_FUNCTION:
                found.append(f"{node.name}: {length} lines")
    return found


def long_c_functions(source: str) -> list[str]:
    """Returns the C functions longer than the limit, by the braces in the first column."""
    found = []
    started = 0
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("{") or re.match(r"\w.*\) ?\{$", line):
            started = number
        elif line.startswith("}") and started:
            if number - started + 1 > LIMIT_OF_FUNCTION:
                found.append(f"line {started}: {number - started + 1} lines")
            started = 0
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", python_files("tsliced/core"), ids=name_of)
def test_the_core_imports_only_itself_and_data_types(path: Path) -> None:
    assert not breaches_of_core(path.read_text())


@pytest.mark.parametrize("package", ["cuda_ckpt", "libtimeslice"])
def test_a_library_imports_nothing_else_of_ours(package: str) -> None:
    for path in python_files(package):
        assert not breaches_of_independence(path.read_text(), package), path


def test_ring_1_never_imports_ring_2() -> None:
    for path in python_files(*(f"tsliced/{part}" for part in RING_1)):
        assert not breaches_of_rings(path.read_text()), path


def test_the_command_line_tool_needs_only_the_client_library() -> None:
    for path in python_files("tsliced/ctl"):
        for imported in imports_of(path.read_text()):
            if imported.module.partition(".")[0] in OURS:
                is_client = imported.is_of("tsliced.ctl") or imported.is_of("libtimeslice")
                is_late = not imported.at_load or imported.for_typing
                is_late = is_late and any(map(imported.is_of, LOADED_LATE))
                assert is_client or is_late, f"{path}:{imported.line} imports {imported.module}"


def test_the_daemon_never_imports_torch() -> None:
    for path in python_files("tsliced", "cuda_ckpt"):
        assert not [i for i in imports_of(path.read_text()) if i.is_of("torch")], path


def test_the_client_library_imports_torch_only_when_it_is_needed() -> None:
    for path in python_files("libtimeslice"):
        for imported in imports_of(path.read_text()):
            if imported.is_of("torch"):
                assert imported.for_typing or not imported.at_load, f"{path}:{imported.line}"


def test_only_cuda_ckpt_loads_the_driver_library() -> None:
    for path in python_files("tsliced", "libtimeslice"):
        assert not loads_libcuda(path.read_text()), path


def test_a_loaded_daemon_has_neither_torch_nor_libcuda() -> None:
    program = (
        "import sys, tsliced.daemon\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'libcuda' not in open('/proc/self/maps').read(), 'libcuda'\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def test_no_module_is_longer_than_the_limit() -> None:
    lengths = {
        name_of(path): len(path.read_text().splitlines())
        for path in [*python_files(*OURS), *(ROOT / "cuda_ckpt").rglob("*.[ch]")]
    }
    assert lengths
    assert {name: n for name, n in lengths.items() if n > LIMIT_OF_MODULE} == {}


def test_no_function_is_longer_than_the_limit() -> None:
    found = {name_of(p): long_functions(p.read_text()) for p in python_files(*OURS)}
    found |= {
        name_of(p): long_c_functions(p.read_text()) for p in (ROOT / "cuda_ckpt").rglob("*.c")
    }
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_the_names_of_the_layout_exist() -> None:
    """A misspelt or moved directory would make the checks above pass over nothing."""
    for part in ["tsliced/core", "cuda_ckpt", "libtimeslice", *(f"tsliced/{r}" for r in RING_1)]:
        assert python_files(part), part
    for module in RING_2:
        assert python_files(module.replace(".", "/")), module


@pytest.mark.parametrize(
    ("source", "breaches"),
    [
        ("import time", ["time"]),
        ("from tsliced.host import devices", ["tsliced.host.devices"]),
        ("from tsliced import driver", ["tsliced.driver"]),
        ("from tsliced.core import model", []),
        ("import random", ["random"]),
        ("from random import Random\ndef choose(random: Random) -> None: ...", []),
        ("from random import Random\nsource = Random(7)", ["Random(7)"]),
        ("def late():\n    import asyncio", ["asyncio"]),
        ("from . import model", ["..model"]),
    ],
)
def test_a_breach_of_the_core_is_seen(source: str, breaches: list[str]) -> None:
    assert breaches_of_core(source) == breaches


def test_other_breaches_are_seen() -> None:
    assert breaches_of_independence("from tsliced.core import model", "libtimeslice")
    assert not breaches_of_independence("from libtimeslice import errors", "libtimeslice")
    assert breaches_of_rings("from tsliced import daemon")
    assert breaches_of_rings("def late():\n    import tsliced.daemon.wiring")
    assert loads_libcuda('import ctypes\nctypes.CDLL("/usr/lib/libcuda.so.1")')
    assert loads_libcuda("ctypes.cdll.LoadLibrary(config.cuda_library)")
    assert not loads_libcuda("ctypes.CDLL(config.nvml_library)")
    assert not loads_libcuda('"""Never loads libcuda.so.1"""; found = "libcuda.so" in maps')
    body = "\n".join(["    pass"] * LIMIT_OF_FUNCTION)
    assert long_functions(f"def long():\n{body}")
    c_body = "\n".join(["    ;"] * LIMIT_OF_FUNCTION)
    assert long_c_functions(f"int main(void)\n{{\n{c_body}\n}}\n")
    assert long_c_functions(f"int main(void) {{\n{c_body}\n}}\n")


def test_the_page_on_the_architecture_names_all_modules_of_the_core_and_folders_of_tests() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = {path.name for path in (ROOT / "tsliced/core").glob("[a-z]*.py")}
    parts |= {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/*.py")}
    assert {"machine.py", "tests/chaos"} <= parts
    assert not [part for part in sorted(parts) if f"`{part}`" not in page]


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert "docs/faults.md" in pages
    assert not [page for page in sorted(pages) if f"({page})" not in readme]


def test_every_key_of_the_configuration_is_used() -> None:
    settings = ast.parse((ROOT / "tsliced/config/settings.py").read_text(encoding="utf-8"))
    keys = {
        field.target.id
        for section in settings.body
        if isinstance(section, ast.ClassDef)
        for field in section.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    apart = {"settings.py", "changes.py"}
    used = {
        node.attr
        for path in python_files("tsliced")
        if path.name not in apart
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert {"max_events", "flush_interval_s"} <= keys
    assert keys <= used, keys - used
