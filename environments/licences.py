"""`make licences`: renew licences.md, the licences of everything that is shipped, installed or needed.

    .venv/bin/python environments/licences.py PYTHON

PYTHON is an interpreter with a pip of 2024 or later, which reads what a package states without installing
it. Licences are quoted from the packages' own metadata, of the version on the page, and are not judged.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from whisperport.build.layouts import all_layouts

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("licences.md")
LOCKS = (Path(__file__).with_name("lock.txt"), ROOT / "benchmarks" / "peers" / "requirements.txt")
ENTRY = re.compile(r"^# for: (.*)\n([a-z0-9][a-z0-9-]*)(?:\[.*?\])?==(\S+)", re.MULTILINE)
NAME = re.compile(r"@?[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
MAX_LICENCE = 80  # characters; longer ones are the text of a licence
NONE = "none stated"
# A package may have no file for the system on which the page is made.
OTHER_SYSTEMS = ("win_amd64", "manylinux2014_aarch64", "manylinux_2_28_x86_64", "macosx_14_0_arm64")
# What the page lists again at its top, because more than a notice may be asked of a user.
NOTABLE = re.compile(rf"GPL|MPL|Mozilla|[Pp]roprietary|LicenseRef|Public Domain|{NONE}")

# Files of the wheel that are no Python code, by their place in the package.
BUNDLED = (
    (
        "speech/data/model/*",
        "the embedded model, trained by this project on synthetic speech (training/); OpenAI's vocabulary",
        "Apache-2.0; the vocabulary MIT (speech/text/ranks/NOTICE)",
    ),
    (
        "speech/data/speech/*",
        "synthetic speech, made by this project with eSpeak NG, flite and Festival (training/); the wheel "
        "has no voice and no code of theirs",
        "Apache-2.0",
    ),
    (
        "speech/data/vad/*",
        "Silero VAD's network, weights unchanged",
        "MIT (speech/data/vad/LICENSE)",
    ),
    ("speech/text/ranks/*", "OpenAI's two vocabularies", "MIT (speech/text/ranks/NOTICE)"),
    (
        "apps/serving/page/*",
        "the server's page; it loads no font and no script of others",
        "Apache-2.0",
    ),
    ("build/layouts/*/*.mjs", "clients of apps", "Apache-2.0"),
    ("evidence.json", "what this project ran", "Apache-2.0"),
    ("neuron_adapter_stub.c", "a library without contents, written here", "Apache-2.0"),
    ("__init__.pyi", "the public names", "Apache-2.0"),
    ("py.typed", "an empty file", "Apache-2.0"),
)

# Toolchains that `compile` uses and that no package index has; a user gets them from the vendor.
FROM_VENDORS = (
    ("Hailo Dataflow Compiler and HailoRT's Python package", "hailo", "Hailo's developer zone"),
    ("NeuroPilot SDK", "mediatek", "MediaTek"),
    ("AWS Neuron SDK: torch-neuronx and neuronx-cc", "aws-neuron", "AWS's own index"),
)
# Toolchains on a package index, as the error messages of `compile` name them.
TOOLCHAINS = {"rknn-toolkit2": "compiling for Rockchip"}
ETHOS_U = "ethos-u"  # an extra of executorch
REMARKS = {
    "onnxruntime-qnn": "the libraries of the vendor in it have the vendor's own licence",
    "rknn-toolkit2": "its licence allows the development of applications for the vendor's chips",
}


def main(python: str) -> None:
    """Write the page."""
    packages = {(name, version): users for name, version, users in locked()}
    rows = [
        (name, version, licence_of(python, name, version), users)
        for (name, version), users in sorted(packages.items())
    ]
    names = {name for name, _ in packages}
    elsewhere = [
        (*of_index(python, requirement), user)
        for requirement, user in needed_elsewhere()
        if normal(requirement) not in names
    ]
    elsewhere += [(*of_npm(requirement), user) for requirement, user in npm_packages()]
    PAGE.write_text(page(rows, elsewhere), encoding="utf-8")


def page(rows: Sequence[Sequence[str]], elsewhere: Sequence[Sequence[str]]) -> str:
    """Return the page of the locked packages and of those that are installed elsewhere."""
    notable = [row for row in (*rows, *elsewhere) if NOTABLE.search(row[2])]
    vendors = [
        (name, "", "not read here", f"{user}; from {source}") for name, user, source in FROM_VENDORS
    ]
    head = ("Package", "Version", "Licence that it states", "Needed by")
    return "\n".join(
        (
            "# Licences",
            "",
            "Written by `make licences`. whisperport itself has the [Apache License 2.0](../LICENSE). Each",
            "licence below is quoted from the package's own metadata and was not judged; what a package",
            "includes of others is told by the package. Nothing but the first table is in the wheel.",
            "",
            "## In the wheel, beside Python code",
            "",
            *table(
                ("Files", "What", "Licence"), [(f"`{files}`", *rest) for files, *rest in BUNDLED]
            ),
            "",
            "## To read before you ship",
            "",
            "Packages of the tables below that state no licence, copyleft, or a vendor's own terms.",
            "",
            *table(head, notable),
            "",
            "## In the locks",
            "",
            "Versions with hashes: [lock.txt](lock.txt), and for `peers`",
            "[requirements.txt](../benchmarks/peers/requirements.txt). `all`: every extra of the lock;",
            "`+cuda`: only where torch is a build for CUDA; `build` builds the package; `tools` is for",
            "`make lock` and this page.",
            "",
            *table(head, rows),
            "",
            "## Outside of the locks",
            "",
            "Extras that `make` does not install, clients of apps (`whisperport apps --install`), and",
            "vendors' toolchains, each in an environment of its own. These are the packages named, without",
            "those that they need; the version is the one that was read, and an installation may choose",
            "another.",
            "",
            *table(head, [*elsewhere, *vendors]),
            "",
        )
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def locked() -> Iterator[tuple[str, str, str]]:
    """Yield name, version and users of each locked package; one in both locks is joined."""
    users: dict[tuple[str, str], list[str]] = {}
    texts = [path.read_text(encoding="utf-8") for path in LOCKS]
    parts = re.findall(r"^# (\S+) has wheels on: ", texts[0], re.MULTILINE)
    every = [part for part in parts if part not in ("build", "tools")]
    with_torch = [f"{part}+cuda" for part in every if part != "fast"]
    for text in texts:
        for names, package, version in ENTRY.findall(text):
            words = names.split()
            for group, name in ((every, "all"), (with_torch, "all+cuda")):
                if set(group) <= set(words):
                    words = [name, *(word for word in words if word not in group)]
            users.setdefault((package, version), []).extend(words)
    for (package, version), words in users.items():
        extras = [extra for extra in direct().get(package, ()) if "all" not in words]
        yield package, version, " ".join(dict.fromkeys((*words, *extras)))


@cache
def direct() -> dict[str, list[str]]:
    """Return package -> the extras of pyproject.toml that name it."""
    found: dict[str, list[str]] = {}
    for extra, lines in optional().items():
        for line in lines:
            found.setdefault(normal(line), []).append(extra)
    return found


def optional() -> dict[str, list[str]]:
    """Return the requirements of each extra of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def needed_elsewhere() -> Iterator[tuple[str, str]]:
    """Yield each requirement outside of the locks that a package index has, and what needs it."""
    needs: dict[str, dict[str, None]] = {}
    for extra, lines in optional().items():
        for line in lines:
            needs.setdefault(line.partition(";")[0].strip(), {})[f"extra {extra}"] = None
    for layout in all_layouts():
        for app in layout.apps.values():
            for requirement in app.packages if app.installer == "pip" else ():
                needs.setdefault(requirement, {})[app.name] = None
    for line in metadata.requires("executorch") or []:
        if f'extra == "{ETHOS_U}"' in line:
            needs.setdefault(line.partition(";")[0].strip(), {})["compiling for Ethos-U"] = None
    for requirement, user in TOOLCHAINS.items():
        needs.setdefault(requirement, {})[user] = None
    joined: dict[str, tuple[str, dict[str, None]]] = {}
    for requirement, users in needs.items():
        if normal(requirement) != "whisperport":
            joined.setdefault(normal(requirement), (requirement, {}))[1].update(users)
    for requirement, users in joined.values():
        yield requirement, ", ".join(users)


def npm_packages() -> Iterator[tuple[str, str]]:
    """Yield each requirement of an app that npm installs, and the app."""
    for layout in all_layouts():
        for app in layout.apps.values():
            for requirement in app.packages if app.installer == "npm" else ():
                yield requirement, app.name


def normal(requirement: str) -> str:
    """Return the normalized name of a requirement's package."""
    match = NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0] if match else requirement).lower()


def licence_of(python: str, name: str, version: str) -> str:
    """Return the licence that a version of a package states."""
    for distribution in metadata.distributions(name=name):
        if distribution.version.partition("+")[0] == version:
            return stated(name, distribution.metadata.json)
    return of_index(python, f"{name}=={version}")[2]


def of_index(python: str, requirement: str) -> tuple[str, str, str]:
    """Return name, version and licence of what the user's package index has for a requirement."""
    ask = [
        python,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
    ]
    ask += ["--ignore-requires-python", "--report", "-", re.sub(r"\[.*?\]", "", requirement)]
    for system in ("", *OTHER_SYSTEMS):
        there = (
            ["--only-binary=:all:", "--target", "unused", "--platform", system] if system else []
        )
        done = subprocess.run([*ask, *there], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            about = json.loads(done.stdout)["install"][0]["metadata"]
            name = normal(about["name"])
            return name, about["version"], stated(name, about)
    raise SystemExit(f"{requirement} was not found:\n{done.stderr}")


def of_npm(requirement: str) -> tuple[str, str, str]:
    """Return name, version and licence of what npm has for a requirement."""
    if not (npm := shutil.which("npm")):
        raise SystemExit("npm is not installed, which knows the licences of its packages")
    ask = [npm, "view", requirement, "name", "version", "license", "--json"]
    found = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
    about = (
        max(found, key=lambda one: _numbers(one["version"])) if isinstance(found, list) else found
    )
    return about["name"], about["version"], about.get("license") or NONE


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def stated(name: str, about: dict[str, Any]) -> str:
    """Return the licence of metadata: its expression, its classifiers, or the first line of its text."""
    classifiers = [one.split(" :: ")[-1] for one in about.get("classifier", ()) if "License" in one]
    text = (about.get("license") or "").strip()
    short = text if text and "\n" not in text and len(text) <= MAX_LICENCE else ""
    licence = about.get("license_expression") or short or ", ".join(classifiers)
    if not licence:
        files = about.get("license_file", ())
        files = [files] if isinstance(files, str) else files
        licence = (
            f"{NONE}; see its {', '.join(Path(file).name for file in files)}" if files else NONE
        )
    return f"{licence}; {REMARKS[name]}" if name in REMARKS else licence


if __name__ == "__main__":
    main(sys.argv[1])
