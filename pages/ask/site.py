"""The page that asks, as files that need no server of ours: the arithmetic runs in the browser.

python -m pages.ask.site OUT     writes OUT/index.html and what lies beside it, for any web server

The Python code is harness's own. Python itself comes from npm (Pyodide), and pydantic's compiled half from
PyPI, in the versions below and that of this environment; build/pyodide/ keeps them. Node compiles the code to
bytecode, which a browser would take a second for.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from harness.report.page import ASSETS
from harness.serve import ask_page

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "pyodide"
PYODIDE = "314.0.7"
PYTHON, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"
"""Of that Pyodide."""
NEEDED = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
BESIDE = ("pydantic", "annotated_types", "typing_extensions", "typing_inspection", "yaml", "pynvml")
"""Packages without compiled code, or that do without it, as they are in this environment."""
UNUSED = {"__pycache__", "v1", "mypy.py"}
"""Folders and files, the latter of pydantic."""
COMPILE = """
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
const folder = pathToFileURL(process.argv[1] + "/");
const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", folder));
const python = await loadPyodide();
const archive = new URL("harness.zip", folder);
python.unpackArchive(new Uint8Array(readFileSync(archive)), "zip", { extractDir: "/made" });
python.runPython(`
import compileall, pathlib, py_compile, zipfile
place = pathlib.Path("/made")
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
compileall.compile_dir(place, quiet=1, force=True, invalidation_mode=unchecked)
with zipfile.ZipFile("harness.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for file in sorted(place.rglob("*")):
        archive.write(file, file.relative_to(place))
`);
writeFileSync(archive, python.FS.readFile("harness.zip"));
"""
"""Puts beside each file of the archive what this Python compiles it to."""


def main(out: Path) -> None:
    """Write the site."""
    (out / "pyodide").mkdir(parents=True, exist_ok=True)
    with tarfile.open(_from_npm()) as package:
        for name in NEEDED:
            found = package.extractfile(f"package/{name}")
            assert found is not None, name
            (out / "pyodide" / name).write_bytes(found.read())
    shutil.copyfile(_compiled_pydantic(), out / "pydantic_core.whl")
    shutil.copyfile(str(ASSETS.joinpath("ask_worker.js")), out / "worker.js")
    with zipfile.ZipFile(out / "harness.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(python_files().items()):
            archive.write(path, name)
    run = ["node", "--input-type=module", "--eval", COMPILE]
    subprocess.run([*run, str(out.resolve())], check=True)
    (out / "index.html").write_text(ask_page("static"), encoding="utf-8")


def python_files() -> dict[str, Path]:
    """By their names in the archive: the packages that a question needs, with recipes and calibrations."""
    program = (
        "import sys, harness.ask; print(*{name.split('.')[1] for name in sys.modules if 'harness.' in name})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    packages = [ROOT / "harness" / name for name in done.stdout.split()]
    files = [*(ROOT / "harness").glob("*.py")]
    files += [file for package in packages for file in package.rglob("*")]
    found = {str(file.relative_to(ROOT)): file for file in files}
    for folder in (ROOT / "recipes", *(path.parent for path in ROOT.glob("profiles/*/calibration.json"))):
        found |= {f"harness/{file.relative_to(ROOT)}": file for file in folder.rglob("*")}
    for name in BESIDE:
        spec = find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        home = Path(spec.origin)
        inside = home.parent.rglob("*.py") if home.name == "__init__.py" else [home]
        above = home.parents[1] if home.name == "__init__.py" else home.parent
        found |= {str(file.relative_to(above)): file for file in inside}
    return {name: file for name, file in found.items() if file.is_file() and not UNUSED & {*file.parts}}


def _from_npm() -> Path:
    return _kept(f"pyodide-{PYODIDE}.tgz", ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"])


def _compiled_pydantic() -> Path:
    release = version("pydantic-core")
    tag = "cp" + PYTHON.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--platform", PLATFORM, "--python-version", PYTHON, f"pydantic-core=={release}"]
    return _kept(f"pydantic_core-{release}-{tag}-{tag}-{PLATFORM}.whl", command)


def _kept(name: str, fetch: list[str]) -> Path:
    """The file of that name, fetched by the command unless it is there."""
    if not (KEPT / name).is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(fetch, cwd=KEPT, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(
                f"pages.ask.site: {' '.join(fetch)}: {error}. It needs npm, pip and their registries once."
            )
    return KEPT / name


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("write python -m pages.ask.site OUT")
    main(Path(sys.argv[1]))
