from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tandem", "kv_transfer", "prefill_worker", "decode_worker", "router", "launcher")
DISTRIBUTION = "tandem-serving"


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


@pytest.mark.parametrize("package", PACKAGES)
def test_import_names_are_ours_alone(package: str) -> None:
    owners = set(packages_distributions().get(package, ()))
    if not owners:
        pytest.skip("Tandem is not installed in this environment")
    assert owners == {DISTRIBUTION}


def test_proto_is_no_package() -> None:
    # proto-plus owns the import name; an __init__.py here would hide it from Google's libraries.
    assert not list((ROOT / "proto").rglob("*.py"))


def test_the_wheel_holds_every_source(tmp_path: Path) -> None:
    build = (
        "import sys\n"
        "from setuptools import build_meta\n"
        "sys.stdout.write(build_meta.build_wheel(sys.argv[1], {}))\n"
    )
    clean = tmp_path / "source"
    clean.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    sources = [name for name in listed if name and (ROOT / name).is_file()]
    for name in sources:
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        (clean / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=clean, check=True, stdout=-3)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    ours = {name for name in sources if name.split("/")[0] in PACKAGES}
    assert {name for name in packed if ".dist-info/" not in name} == ours
    assert "tandem/py.typed" in packed


def test_the_readme_names_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"^make ([a-z-]+)", readme, flags=re.MULTILINE))
    assert {"run", "test"} <= verbs
    assert verbs <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


def test_the_tested_set_satisfies_the_declared_ranges(project: dict[str, object]) -> None:
    from packaging.requirements import Requirement

    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().lower().splitlines()
        if not line.startswith("#")
    )
    extras = project["optional-dependencies"]
    dependencies = project["dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(dependencies, list)
    for text in [*dependencies, *extras["dev"]]:
        requirement = Requirement(text)
        if requirement.name != "setuptools":  # comes with the virtual environment's build
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), text


def test_no_registry_is_named(project: dict[str, object]) -> None:
    assert project["name"] == DISTRIBUTION
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        assert not re.search(r"https?://|--index-url|--find-links", (ROOT / name).read_text())
