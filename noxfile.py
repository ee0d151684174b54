"""Sessions: ``docs``, ``tests``, ``lint``, ``mutation``. Plain ``nox`` runs lint, tests and docs.

All sessions share one environment, ``.nox/dev``: torch is large, and one installation of it serves them all.
It is made again when ``pyproject.toml`` or ``requirements/constraints.txt`` changes, and reused otherwise.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
DEV = ROOT / ".nox" / "dev"
BUILD = ROOT / "build" / "docs"
HTML = BUILD / "html"

nox.needs_version = ">=2024.3"
nox.options.sessions = ["lint", "tests", "docs"]
nox.options.error_on_external_run = True


def _python(session: nox.Session) -> str:
    """Return the shared environment's interpreter; make the environment first where it is missing or old."""
    stamp = DEV / "installed"
    inputs = [ROOT / "pyproject.toml", ROOT / "requirements" / "constraints.txt"]
    wanted = hashlib.sha256(sys.version.encode() + b"".join(p.read_bytes() for p in inputs)).hexdigest()
    python = DEV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not stamp.is_file() or stamp.read_text() != wanted:
        session.log("Making the environment .nox/dev; this fetches torch and takes a minute or more.")
        shutil.rmtree(DEV, ignore_errors=True)
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(DEV), external=True)
        extras = ".[tests,docs,lint]"
        # Files are compiled when they are imported, which few of the installed ones ever are.
        install = ["-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
        install += ["--constraint", "requirements/constraints.txt"]
        session.run(str(python), *install, "--editable", extras, external=True)
        stamp.write_text(wanted)
    return str(python)


def _run(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    # Absolute paths to the environment's interpreter, so that a Python that is active outside cannot leak in.
    # Compiled files are written also where the environment forbids it: many processes import the same files.
    always = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
    session.run(_python(session), *arguments, env={**always, **(env or {})}, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run pytest in parallel; further arguments go to it: ``nox -s tests -- -k pool``.

    The tests of one file run in one process, because module fixtures are expensive, and files in their order: those
    with few tests, which xdist would run last, take long.  ``-n 0`` runs all in one.
    """
    parallel = ["-n", "auto", "--maxprocesses=8", "--dist=loadfile", "--no-loadscope-reorder"]
    _run(session, "-m", "pytest", *parallel, "--durations=15", "--durations-min=1", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style with ruff, types with mypy, the directions of imports with import-linter, and sizes."""
    _run(session, "-m", "ruff", "check", ".")
    _run(session, "-m", "ruff", "format", "--check", ".")
    _run(session, "-m", "mypy", "--strict", "src")
    _run(session, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    _run(session, "tools/check_sizes.py")


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """Break each tagged statement of the source in turn; a test must fail. Prints the table."""
    _run(session, "tests/mutation/mutate.py", *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site and check it. ``-- --serve [PORT]`` then serves it, ``-- --live`` executes the gallery.

    ``--recorded`` shows the recorded runs also on a machine with an accelerator.  ``--tested`` leaves out the doctests,
    which the session ``tests`` runs as well.
    """
    options = list(session.posargs)
    tested = "--tested" in options
    if tested:
        options.remove("--tested")
    env = {}
    for mode in ("live", "recorded"):
        if f"--{mode}" in options:
            options.remove(f"--{mode}")
            env["ACTOFFLOAD_GALLERY"] = mode
    serve = "--serve" in options
    port = "8000"
    if serve:
        options.remove("--serve")
        if options and options[0].isdigit():
            port = options.pop(0)
    if options:
        session.error(f"docs takes --serve [PORT], --live, --recorded and --tested, and not {' '.join(options)}.")

    # Pages of an earlier build that no longer exist would satisfy links of this one.
    shutil.rmtree(HTML, ignore_errors=True)
    sphinx = ["-m", "sphinx", "-W", "-n", "--keep-going", "-c", ".", "-d", str(BUILD / "doctrees")]
    _run(session, *sphinx, "-b", "html", "docs", str(HTML), env=env)
    if not tested:
        _run(session, *sphinx, "-b", "doctest", "docs", str(BUILD / "doctest"), env=env)
    _run(session, "-m", "codespell_lib")  # its configuration is in pyproject.toml
    _run(session, "tools/check_site.py", str(HTML), "--external", str(BUILD / "external-links.txt"))
    _run(session, "tools/record_gallery.py", "check")
    _run(session, "benchmarks/report.py", "--check")
    browser = ["tests/site/test_built_site.py", "tests/site/test_explorer.py"]
    _run(session, "-m", "pytest", "-q", "-n", "2", *browser, env={"ACTOFFLOAD_SITE": str(HTML)})
    if serve:
        session.log(f"Serving http://127.0.0.1:{port}/ until Ctrl-C.")
        _run(session, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", str(HTML))
