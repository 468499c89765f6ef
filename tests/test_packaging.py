"""The wheel: everything in it, nothing beside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def test_wheel(tmp_path):
    # A copy, as setuptools leaves a build folder in its source tree.
    source = tmp_path / "source"
    subprocess.run(["git", "checkout-index", "-a", f"--prefix={source}/"], cwd=REPOSITORY, check=True)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name.split("-")[0] for path in site.iterdir()} == {"ssa_hf", "ssa_hf_autoload"}
    assert (site / "ssa_hf" / "py.typed").is_file()
    script = """
import ssa_hf, ssa_hf.patches.llama, ssa_hf.recipes.demo, ssa_hf_autoload
assert ssa_hf_autoload.__file__.startswith(SITE)
assert ssa_hf.__file__.startswith(SITE) and ssa_hf.patches.__file__.startswith(SITE), ssa_hf.__file__
assert "alice" in ssa_hf.recipes.demo.read_text(None).lower()
assert {"llama", "nemotron", "roberta"} <= {family.name for family in ssa_hf.registered_families()}
""".replace("SITE", repr(str(site)))
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)


def test_top_level_is_as_agreed():
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    visible = {name for name in top if not name.startswith(".")}
    documents = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"}
    assert visible == documents | {"patches", "pyproject.toml", "recipes", "ssa_hf", "tests"}
