"""`whisperport apps`"""

from typing import Any

import click

from whisperport.apps.cli.console import (
    print_filled,
    print_json,
    print_lines,
    print_next,
    print_table,
    stages,
)
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.layouts import App, Layout, all_layouts, layout_of
from whisperport.build.layouts.client import is_installed
from whisperport.build.layouts.environments import install as run_install


@click.command(
    cls=Verb, short_help="List the apps whose files `convert` writes, or install one of them."
)
@option(
    "--install",
    group="App",
    metavar="APP",
    help="Install an app's packages in an environment of their own, which `convert` and `verify` use",
)
@as_json
def apps(install: str | None, as_json: bool) -> None:
    """List the apps whose files `whisperport convert` writes, and what each does not take over.

    \b
    Examples:
      $ whisperport apps
      $ whisperport apps --install faster-whisper
    """
    if install is not None:
        with stages():
            run_install(layout_of(install).apps[install])
    listed = [(layout, app) for layout in all_layouts() for app in layout.apps.values()]
    if as_json:
        print_json([_to_json(*entry) for entry in listed])
        return
    print_table(
        ("app", "files", "precisions", "compared", "installed"),
        [
            (
                app.name,
                layout.title,
                ", ".join(layout.precisions),
                app.compared,
                "yes" if is_installed(app) else "no",
            )
            for layout, app in listed
        ],
    )
    print_lines("")
    print_filled(
        ("app", "what it does not take from a checkpoint, or limits"),
        [(app.name, "; ".join(app.drops)) for _, app in listed],
    )
    print_next("convert", "default", "--for", listed[0][1].name, "--out", "build/converted")


def _to_json(layout: Layout, app: App) -> dict[str, Any]:
    return {
        "app": app.name,
        "files": layout.title,
        "precisions": list(layout.precisions),
        "compared": app.compared,
        "packages": list(app.packages),
        "installed": is_installed(app),
        "drops": list(app.drops),
    }
