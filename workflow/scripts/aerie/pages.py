"""HTML pages from the templates in workflow/report."""

from pathlib import Path
from typing import Any

import jinja2

_TEMPLATES = Path(__file__).resolve().parents[2] / "report"


def render(template: str, **values: Any) -> str:
    """The page; text is escaped, and a value that the template lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)
