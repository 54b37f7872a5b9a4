"""Hooks of mkdocs.yml: a page for each package of the trainer, written from its docstrings."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# in the order in which a package may import those before it
PACKAGES = ("config", "distributed", "model", "parallel", "optimizer", "checkpoint", "data")
PACKAGES += ("observe", "training")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the entry api/ of the navigation by the pages."""
    pages = [{f"megatron.{package}": f"api/{package}.md"} for package in PACKAGES]
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference[reference.index({"API": "api/"})] = {"API": pages}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, which exist only in the site."""
    for package in PACKAGES:
        content = page_of(package)
        files.append(File.generated(config, f"api/{package}.md", content=content))
    return files


def page_of(package: str) -> str:
    """The modules of a package, each with its public classes and functions."""
    folder = ROOT / "megatron" / package
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(folder.rglob("*.py"))
        if not path.name.startswith("_")
    ]
    return "\n\n".join([f"# megatron.{package}", *(f"::: {module}" for module in modules)]) + "\n"
