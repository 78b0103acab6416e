"""Ships the scripts of others with the site, which asks no other server and opens from the file system.

mermaid draws the diagrams; iframe-worker searches where a page was opened from a file. npm fetches them once,
into out/site-scripts. Without npm the site is built all the same: diagrams stay text, and pages that are
opened from files cannot be searched.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

SCRIPTS = {  # name on npm: (version, file, sha256 of the file)
    "mermaid": (
        "11.17.2",
        "dist/mermaid.min.js",
        "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8",
    ),
    "iframe-worker": (
        "1.0.4",
        "shim/index.js",
        "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609",
    ),
}
FOLDER = Path(__file__).resolve().parents[2] / "out" / "site-scripts"

_shipped: dict[str, Path] = {}


@event_priority(100)  # before the offline plugin, which would take the script from another server
def on_config(config: Any) -> None:
    """Fetch the scripts; do without what cannot be fetched."""
    for name in SCRIPTS:
        try:
            _shipped[name] = fetched(name)
        except (OSError, subprocess.SubprocessError, tarfile.TarError, LookupError) as error:
            print(f"mkdocs: the site is built without {name}: {error}", file=sys.stderr)
    if "mermaid" not in _shipped:
        config.mdx_configs["pymdownx.superfences"]["custom_fences"] = []
    if "iframe-worker" in _shipped:
        config.extra["polyfills"] = [_place("iframe-worker")]
    else:
        config.plugins["material/offline"].config.enabled = False


def on_files(files: Any, config: Any) -> None:
    for name, path in _shipped.items():
        files.append(File.generated(config, _place(name), abs_src_path=str(path)))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Pages with diagrams load mermaid before the theme's own script; a narrow window scrolls diagrams."""
    output, count = re.subn(
        r'(?s)<pre class="mermaid">.*?</pre>',
        r'<div style="overflow-x: auto"><div style="min-width: 30rem">\g<0></div></div>',
        output,
    )
    if not count:
        return output
    script = f'<script src="{get_relative_url(_place("mermaid"), page.url)}"></script>'
    return output.replace('<script id="__config"', script + '<script id="__config"', 1)


def fetched(name: str) -> Path:
    """The script, from out/site-scripts or else by npm.

    Raises:
        OSError, SubprocessError, TarError, LookupError: if npm is not there, fails, or has another script.
    """
    version, inside, sha256 = SCRIPTS[name]
    path = FOLDER / f"{name}-{version}.js"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command = ["npm", "pack", "--silent", f"{name}@{version}"]
            subprocess.run(command, cwd=folder, check=True, timeout=120, capture_output=True)
            (archive,) = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as files:
                files.extract(f"package/{inside}", folder, filter="data")
            os.replace(Path(folder, "package", inside), path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise OSError(f"{path} has sha256 {found}, not {sha256}: not used, remove it")
    return path


def _place(name: str) -> str:
    """Where the site has it."""
    return f"assets/javascripts/{name}-{SCRIPTS[name][0]}.js"
