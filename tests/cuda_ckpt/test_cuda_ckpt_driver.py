"""``cuda_ckpt._driver``: layouts against numbers and against a compiled header; the loader."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cuda_ckpt import Driver, DriverMissingError, DriverTooOldError, _driver
from cuda_ckpt.errors import _TABLE

# (structure, size, alignment, {field: (offset, size)}): measured with the vendor's headers.
LAYOUTS: list[tuple[type[ctypes.Structure], int, int, dict[str, tuple[int, int]]]] = [
    (_driver.CUuuid, 16, 1, {"bytes": (0, 16)}),
    (
        _driver.CUcheckpointLockArgs,
        64,
        8,
        {"timeoutMs": (0, 4), "reserved0": (4, 4), "reserved1": (8, 56)},
    ),
    (_driver.CUcheckpointCheckpointArgs, 64, 8, {"reserved": (0, 64)}),
    (_driver.CUcheckpointGpuPair, 32, 1, {"oldUuid": (0, 16), "newUuid": (16, 16)}),
    (
        _driver.CUcheckpointRestoreArgs,
        64,
        8,
        {
            "gpuPairs": (0, 8),
            "gpuPairsCount": (8, 4),
            "reserved": (12, 44),
            "reserved1": (56, 8),
        },
    ),
    (_driver.CUcheckpointUnlockArgs, 64, 8, {"reserved": (0, 64)}),
]
STATES = {
    "CU_PROCESS_STATE_RUNNING": _driver.CU_PROCESS_STATE_RUNNING,
    "CU_PROCESS_STATE_LOCKED": _driver.CU_PROCESS_STATE_LOCKED,
    "CU_PROCESS_STATE_CHECKPOINTED": _driver.CU_PROCESS_STATE_CHECKPOINTED,
    "CU_PROCESS_STATE_FAILED": _driver.CU_PROCESS_STATE_FAILED,
}


def _header() -> Path | None:
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr"):
        if root and (Path(root) / "include" / "cuda.h").is_file():
            return Path(root) / "include" / "cuda.h"
    return None


@pytest.fixture(scope="module")
def header_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What a C program compiled with the vendor's header measures, by expression."""
    header, compiler = _header(), shutil.which("cc") or shutil.which("gcc")
    if header is None or compiler is None:
        pytest.skip("needs cuda.h (set CUDA_HOME) and a C compiler")
    directory = tmp_path_factory.mktemp("layout")
    expressions = ["CUDA_VERSION", *STATES, *(name for name, _, _ in _TABLE.values())]
    for structure, _, _, fields in LAYOUTS:
        name = structure.__name__
        expressions += [f"sizeof({name})", f"_Alignof({name})"]
        for field in fields:
            expressions += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
    lines = [f'printf("%ld %s\\n", (long)({text}), "{text}");' for text in expressions]
    source = directory / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    program = directory / "layout"
    subprocess.run(
        [compiler, "-I", header.parent, "-o", program, source],
        check=True,
        capture_output=True,
        timeout=60,
    )
    output = subprocess.run([program], check=True, capture_output=True, text=True, timeout=10)
    pairs = (line.split(" ", 1) for line in output.stdout.splitlines())
    return {text: int(number) for number, text in pairs}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0].__name__)
def test_a_structure_has_the_published_layout(
    layout: tuple[type[ctypes.Structure], int, int, dict[str, tuple[int, int]]],
) -> None:
    structure, size, alignment, fields = layout
    assert (ctypes.sizeof(structure), ctypes.alignment(structure)) == (size, alignment)
    assert [field[0] for field in structure._fields_] == list(fields)
    for name, (offset, field_size) in fields.items():
        descriptor = getattr(structure, name)
        assert (descriptor.offset, descriptor.size) == (offset, field_size), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0].__name__)
def test_a_structure_has_the_layout_that_the_header_compiles_to(
    layout: tuple[type[ctypes.Structure], int, int, dict[str, tuple[int, int]]],
    header_says: dict[str, int],
) -> None:
    structure, _, _, fields = layout
    name = structure.__name__
    if name == "CUcheckpointRestoreArgs" and not 13000 <= header_says["CUDA_VERSION"] < 13030:
        pytest.skip("cuda.h of another version names the reserved part of the block differently")
    assert header_says[f"sizeof({name})"] == ctypes.sizeof(structure)
    assert header_says[f"_Alignof({name})"] == ctypes.alignment(structure)
    for field in fields:
        descriptor = getattr(structure, field)
        assert header_says[f"offsetof({name}, {field})"] == descriptor.offset
        assert header_says[f"sizeof((({name} *)0)->{field})"] == descriptor.size


def test_states_and_error_codes_have_the_numbers_of_the_header(
    header_says: dict[str, int],
) -> None:
    assert {name: header_says[name] for name in STATES} == STATES
    assert {name: header_says[name] for name, _, _ in _TABLE.values()} == {
        name: code for code, (name, _, _) in _TABLE.items()
    }


def test_a_missing_library_is_named_with_what_to_do() -> None:
    with pytest.raises(DriverMissingError, match=r"/nowhere/libcuda\.so\.1") as caught:
        Driver("/nowhere/libcuda.so.1")
    assert caught.value.code is None
    assert "CUDA_CKPT_LIBRARY" in str(caught.value)


def test_a_library_that_is_not_the_driver_is_refused() -> None:
    with pytest.raises(DriverMissingError, match="not the CUDA driver: it has no cuInit"):
        Driver("libc.so.6")


def test_the_environment_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_CKPT_LIBRARY", "/elsewhere/libcuda.so.1")
    with pytest.raises(DriverMissingError, match=r"/elsewhere/libcuda\.so\.1"):
        Driver()


def test_a_given_path_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_CKPT_LIBRARY", "/elsewhere/libcuda.so.1")
    with pytest.raises(DriverMissingError, match=r"/given/libcuda\.so\.1"):
        Driver("/given/libcuda.so.1")


STUB = """
int cuInit(unsigned f) { return 34; }
int cuDriverGetVersion(int *v) { return CODE; }
int cuGetErrorName(int c, const char **t) { return 34; }
int cuGetErrorString(int c, const char **t) { return 34; }
int cuDeviceGetCount(int *n) { return 34; }
int cuDeviceGet(int *d, int i) { return 34; }
"""


def _compile_library(directory: Path, source: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (directory / "library.c").write_text(source)
    library = directory / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, directory / "library.c"],
        check=True,
        timeout=60,
    )
    return str(library)


def test_the_stub_library_of_the_toolkit_is_recognised(tmp_path: Path) -> None:
    library = _compile_library(tmp_path, STUB.replace("CODE", "34"))
    with pytest.raises(DriverMissingError, match="stub") as caught:
        Driver(library)
    assert (caught.value.code, caught.value.name) == (34, "CUDA_ERROR_STUB_LIBRARY")


def test_a_driver_without_checkpoint_functions_is_too_old(tmp_path: Path) -> None:
    library = _compile_library(tmp_path, STUB.replace("return CODE", "*v = 12040; return 0"))
    with pytest.raises(DriverTooOldError, match="which came with driver 570") as caught:
        Driver(library)
    assert caught.value.driver_version == 12040
