"""Compile stand-ins for the CANN libraries that torch_npu links, so that ``import torch_npu`` works without CANN.

    python -m ep_fx.testing.npu.cann.stubs OUT        then, before a process starts, LD_LIBRARY_PATH=OUT

Which symbols to export is read out of the installed wheel (``nm -D``), so that the stubs follow its version; no header
or binary of CANN is used. A symbol with a body stands in ``runtime.c`` or ``hccl.c`` beside this file; every other
returns 0, the code of success; to execute an operator is refused (but for two). Needs gcc and binutils; takes
about a second. Neither torch nor torch_npu is imported, so this file also runs as a script.
"""
from __future__ import annotations

import argparse
import glob
import importlib.util
import re
import subprocess
from pathlib import Path

CANN = (
    "hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb", "fmk_parser",
    "ascend_protobuf",
)
"""Libraries of CANN that some library of the wheel needs; each becomes an empty one that needs the one with all."""

SYSTEM = ("libstdc++.so.6", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")
_BODY = re.compile(r"^(?:int|size_t|const char|void) \*?(\w+)\(", re.MULTILINE)
_CXX_DATA = ("_ZTV", "_ZTI", "_ZTS")


def build(out: Path, devices: int = 8, soc: str = "Ascend910B1") -> int:
    """Writes the libraries into `out`, which is made where it is not there.

    Args:
        devices: how many NPUs there seem to be, 1..64.
        soc: name of the chip that torch_npu is told.

    Returns:
        the number of symbols that stand there without a body.

    Raises:
        FileNotFoundError: gcc or nm is not installed, or torch or torch_npu.
        subprocess.CalledProcessError: gcc refused.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = [Path(__file__).with_name(name) for name in ("runtime.c", "hccl.c")]
    bodies = {name for source in sources for name in _BODY.findall(source.read_text())}
    symbols = [name for name in undefined() if name not in bodies]
    rest, empty = out / "rest.c", out / "empty.c"
    rest.write_text("long ep_fx_cann_zero(void) { return 0; }\n" + "".join(map(_alias, symbols)))
    empty.write_text("")
    shared = ("gcc", "-O1", "-Wall", "-shared", "-fPIC")
    defines = (f"-DSTUB_DEVICES={devices}", f'-DSTUB_SOC="{soc}"')
    named = "-Wl,-soname,libcann_stub.so"
    _run(*shared, *defines, named, *map(str, [*sources, rest]), "-lrt", "-o", str(out / "libcann_stub.so"))
    for name in CANN:
        link = (f"-L{out}", "-Wl,--no-as-needed", "-lcann_stub", "-Wl,-rpath,$ORIGIN")
        _run(*shared, f"-Wl,-soname,lib{name}.so", str(empty), *link, "-o", str(out / f"lib{name}.so"))
    return len(symbols)


def undefined() -> list[str]:
    """Symbols that the wheel's libraries need and neither torch, the wheel, Python nor the system gives, sorted."""
    torch, npu = _package("torch"), _package("torch_npu")
    needing = [path for part in ("lib/*.so", "_C*.so", "dynamo/torchair/core/*.so") for path in npu.glob(part)]
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    system = [path for name in SYSTEM if (path := _listed(listed, name)) is not None]
    giving = [*needing, *torch.glob("lib/lib*.so*"), *map(Path, system), *map(Path, glob.glob("/lib*/ld-linux*.so.*"))]
    given = {name for path in giving for name in _symbols(path, "--defined-only")}
    needed = {name for path in needing for name in _symbols(path, "--undefined-only")}
    return sorted(name for name in needed - given if not re.match(r"_?Py[A-Z_]", name))


def _listed(listed: str, name: str) -> str | None:
    found = re.search(rf"^\s*{re.escape(name)} \(libc6,(?:x86-64|AArch64)[^=]*=> (\S+)", listed, re.MULTILINE)
    return found and found[1]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{name} is not installed: the stubs are made after its libraries")
    return Path(spec.origin).parent


def _symbols(path: Path, which: str) -> list[str]:
    """Dynamic symbols of a library without their versions; weak ones that are undefined may stay so."""
    listed = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=True).stdout
    fields = [line.split() for line in listed.splitlines()]
    return [field[-1].partition("@")[0] for field in fields if which == "--defined-only" or field[0] == "U"]


def _alias(name: str) -> str:
    """A definition in assembler, as the names of C++ are no names of C."""
    if name.startswith(_CXX_DATA):
        body = f'.data\\n.globl {name}\\n.type {name},@object\\n.size {name},256\\n{name}: .zero 256\\n.text'
    else:
        body = f'.globl {name}\\n.type {name},@function\\n.set {name}, ep_fx_cann_zero'
    return f'__asm__("{body}");\n'


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """The command line: ``OUT [--devices N] [--soc NAME]``."""
    parser = argparse.ArgumentParser(description="compile stand-ins for the CANN libraries that torch_npu links")
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--soc", default="Ascend910B1")
    arguments = parser.parse_args()
    print(f"{build(arguments.out, arguments.devices, arguments.soc)} symbols stand in {arguments.out}")


if __name__ == "__main__":
    main()
