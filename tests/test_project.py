"""Facts about the repository itself."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "jaxpage", "models", "experiments")
MODULES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_docstring(module):
    assert ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))


def test_structure_names_every_module_and_no_other():
    structure = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^- `([^`]+\.py)`: \S", structure, flags=re.MULTILINE)) == MODULES


def test_commit_hooks_run_what_make_check_runs():
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert recipe is not None
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert commands == ["$(call setup,dev)", *hooks]
