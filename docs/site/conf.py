"""Sphinx's configuration: `make site` builds from the repository's root, with this folder as -c.

In: `docs/`, the other pages of `include_patterns`, docstrings. Out: `build/site`, which needs
no other host: no script, style or font is fetched from elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent))

from clamor_ray import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "clamor-ray"
author = "the authors of clamor-ray"
project_copyright = author
release = version = __version__

# The first three are Sphinx's own; the last five are beside this file.
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.graphviz",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_click",
    "sphinx_design",
    "docstrings",
    "failure_links",
    "metrics_table",
    "names",
    "navigation",
]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/*.md", "docs/*/*.md", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
include_patterns += ["CHANGELOG.md", "SECURITY.md", "k8s/README.md"]
exclude_patterns = ["build", ".venv", ".git", "docs/model", "docs/site"]  # not looked into
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub's, for links like failure.md#a-peer-that-is-silent

autodoc_member_order = "bysource"
# From private bases, too, but not what NumPy, Python and `ClamorError` give.
INHERITED: Final = "ndarray,tuple,Mapping,ClamorError,Warning,Exception"
autodoc_default_options: Final = {
    "members": True,
    "inherited-members": INHERITED,
    "exclude-members": "add_note,with_traceback",
}
autodoc_type_aliases: Final = {"npt.ArrayLike": "numpy.typing.ArrayLike"}
# Types in signatures that have no page, and why.
nitpick_ignore: Final = [
    # What a program is translated to: for those who build on it, not for its users.
    ("py:class", "clamor_ray._recipes.program.tables.Tables"),
    ("py:class", "clamor_ray._read.ref.T"),  # a type variable: the object of a GlobalRef[T]
    ("py:class", "clamor_ray._read.lease.Lease"),  # Transaction.lease is for the library's rooms
    ("py:class", "clamor_ray.collection.run.schedule.Policy"),  # Options.policy is for them, too
]
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True

graphviz_output_format = "svg"

html_title = f"clamor-ray {release}"
html_theme = "pydata_sphinx_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]
html_copy_source = False
html_sidebars: Final = {"docs/comparisons": []}  # no page is under it
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "pygments_light_style": "tango",
}


def setup(app: Sphinx) -> None:
    """Nothing but the extensions above."""
