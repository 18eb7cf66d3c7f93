"""Settings of the site: ``sphinx-build -W docs build/docs`` makes it, from pages and docstrings."""

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project = "amp_patch"
release = re.search(r'__version__ = "(.+)"', (ROOT / "amp_patch" / "__init__.py").read_text())[1]
copyright = author = "the amp_patch authors"
html_title = f"amp_patch {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # [text](page.md#a-heading) is checked
html_theme = "furo"  # of system fonts: a page asks the network for nothing
html_static_path = ["_static"]
html_copy_source = False

# docstrings say `name` for what they mean, and types by their annotations
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_custom_sections = []


def setup(app: Sphinx) -> None:
    """Let pages show Mermaid's text, which GitHub draws."""
    app.add_lexer("mermaid", TextLexer)
