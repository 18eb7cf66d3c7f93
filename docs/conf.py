"""Settings of the site: ``sphinx-build -W docs build/docs`` makes it, from pages and docstrings."""

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project = "amp_patch"
release = re.search(r'__version__ = "(.+)"', (ROOT / "amp_patch" / "__init__.py").read_text())[1]
html_title = f"amp_patch {release}"
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # links to headings, [text](page.md#a-heading), are checked
smartquotes = False  # a message on a page has the quotes that it is raised with
html_theme = "furo"  # its fonts are the system's: a page asks the network for nothing
html_static_path = ["_static"]
html_css_files = ["motion.css"]
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "scorer.js")

default_role = "py:obj"  # what docstrings mean by `name`
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # the attributes of a class are a list, not entries of their own
autodoc_typehints = "none"  # the docstrings say them in words


def add_messages(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give the search page the errors and warnings, which _static/messages.js finds a query in.

    They are what the two pages of messages quote: those of amp_patch, and torch's that it explains.
    """
    if pagename == "search":
        found = [
            {"link": f"{name}.html#{quote.parent['ids'][0]}", "text": line.astext()}
            for name in ("messages", "mistakes")
            for quote in app.env.get_doctree(name).findall(nodes.block_quote)
            for line in quote.findall(nodes.paragraph)
        ]
        app.add_js_file(None, body=f"const MESSAGES = {json.dumps(found)};")
        app.add_js_file("messages.js", loading_method="defer")


def setup(app: Sphinx) -> None:
    """Add the messages to the search."""
    app.connect("html-page-context", add_messages)
