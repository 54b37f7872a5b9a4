"""Renders the HTML templates of this folder; what they are given is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from megatron.tools._report import picture
from megatron.tools._report.curves import COLOURS

HERE = Path(__file__).parent
# of the parts of a bar: those of the curves in an order whose neighbours differ, and three more
PARTS = (
    *("#009e73", "#d55e00", "#0072b2", "#e69f00", "#cc79a7"),
    *("#56b4e9", "#f0e442", "#1e293b", "#94a3b8", "#8c564b"),
)

ENVIRONMENT = Environment(
    loader=FileSystemLoader(HERE),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
ENVIRONMENT.globals |= {
    "colours": COLOURS,
    "part_colours": PARTS,
    "glyphs": picture.GLYPHS,
    "broken": picture.BROKEN,
    "grey": picture.GREY,
}
MACROS: Any = ENVIRONMENT.get_template("macros.html").module


def render(template: str, **content: Any) -> Markup:
    """The HTML of a template."""
    return Markup(ENVIRONMENT.get_template(template).render(content))


def part_heads(names: list[str]) -> list[Markup]:
    """The heads of columns of parts of a bar, each next to its colour."""
    return [MACROS.square(PARTS[number % len(PARTS)]) + name for number, name in enumerate(names)]
