"""Environments of apps: each app's client is installed in one of its own, in the user's cache.

    $XDG_CACHE_HOME/whisperport/apps/APP        default: ~/.cache/whisperport/apps/APP

An environment variable, WHISPERPORT_APP_NAME in capitals, names another one: a Python interpreter, or
the folder of `node_modules`. Nothing is installed unless `install` is called.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from whisperport.build.export.bundle_cache import cache_folder
from whisperport.build.layouts.layout import App
from whisperport.errors import MissingPackageError, UsageError, WhisperportError
from whisperport.system.progress import begin_stage

COMPLETE = ".complete"  # file in an environment, made when everything is installed
MAX_LINE = 300  # characters of an installer's message


def variable(app: App) -> str:
    """Return the name of the environment variable that names an app's environment."""
    return f"WHISPERPORT_APP_{re.sub('[^A-Z0-9]', '_', app.name.upper())}"


def folder_of(app: App) -> Path:
    """Return the folder in which an app's client is installed."""
    return cache_folder() / "apps" / app.name


def command_of(app: App) -> list[str] | None:
    """Return the command that runs a script with an app's packages; None: they are not installed.

    For an app of npm, the last word is the folder in which `node_modules` is.

    Raises:
        UsageError: the environment variable names something that does not exist.
    """
    named = os.environ.get(variable(app))
    if named and not Path(named).exists():
        raise UsageError(
            f"the environment of {app.name} does not exist: {named}",
            why=f"{variable(app)} names it",
            hint=f"name a Python interpreter, or run `whisperport apps --install {app.name}`",
        )
    installed = _installed(app)
    if app.installer == "npm":
        node = shutil.which("node")
        folder = Path(named) if named and (Path(named) / "node_modules").is_dir() else None
        folder = folder if named else installed
        return [node, os.fspath(folder)] if node and folder else None
    if named:
        return [named]
    if installed:
        return [os.fspath(_python(installed))]
    return [sys.executable] if _is_here(app.module) else None


def install(app: App) -> None:
    """Install an app's client in an environment of its own; an older one is replaced.

    Raises:
        MissingPackageError: the installer is missing, or could not install a package.
    """
    folder = folder_of(app)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin_stage(f"installing {', '.join(app.packages)}")
    if app.installer == "npm":
        # Without its scripts: nothing that a package brings runs during the installation.
        _run(app, ["npm", "install", "--ignore-scripts", "--no-fund", *app.packages], folder)
    else:
        _run(app, [sys.executable, "-m", "venv", "."], folder)
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        _run(app, [os.fspath(_python(folder)), *pip, *app.packages], folder)
    (folder / COMPLETE).touch()


def _installed(app: App) -> Path | None:
    """Return the folder in which an app is completely installed; None: nowhere, or there is no cache."""
    try:
        folder = folder_of(app)
        # An installation that was killed has an interpreter, too.
        return folder if (folder / COMPLETE).is_file() else None
    except (OSError, WhisperportError):  # without permission to read it; no home folder
        return None


def _is_here(module: str) -> bool:
    """Return whether this interpreter has a module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a module in a package that is missing
        return False


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _run(app: App, command: list[str], folder: Path) -> None:
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        failed, why = bool(result.returncode), result.stderr.strip().split("\n")[-1]
    except OSError as error:
        failed, why = True, f"{command[0]}: {error.strerror}"
    if failed:
        shutil.rmtree(folder, ignore_errors=True)
        raise MissingPackageError(
            f"{app.name} could not be installed",
            why=why[:MAX_LINE],
            hint=f"install {', '.join(app.packages)} yourself, and set {variable(app)}",
        )
