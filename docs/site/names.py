"""In: names in docstrings and signatures. Out: links to the page that has each.

Three things make Sphinx miss a name. The package is `clamor` in examples. A class is defined in a
private module. Or it is another project's: `OTHERS` says where that project documents it, so that
the build asks no other host.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any, Final

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

from clamor_ray import _renamed

if TYPE_CHECKING:
    from docutils.parsers.rst.states import Inliner
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

# The first that has an object gives it its public name.
MODULES: Final = (
    "clamor_ray.errors",
    "clamor_ray",
    "clamor_ray.data",
    "clamor_ray.collective",
    "clamor_ray.aio",
    "clamor_ray.ray_collective",
    "clamor_ray.schedule",
    "clamor_ray.collection.options",
)
PYTHON: Final = "https://docs.python.org/3/library/"
NUMPY: Final = "https://numpy.org/doc/stable/reference/"
# Types of other projects that signatures name.
OTHERS: Final = {
    **{
        f"collections.abc.{name}": f"{PYTHON}collections.abc.html#collections.abc.{name}"
        for name in ("AsyncIterator", "Callable", "Iterable", "Iterator", "Mapping", "Sequence")
    },
    "os.PathLike": f"{PYTHON}os.html#os.PathLike",
    "Path": f"{PYTHON}pathlib.html#pathlib.Path",
    **{
        f"numpy.{name}": f"{NUMPY}generated/numpy.{name}.html"
        for name in ("copy", "dot", "dtype", "ndarray")
    },
    **{
        f"{np}.{name}": f"{NUMPY}arrays.scalars.html#numpy.{name}"
        for np in ("np", "numpy")
        for name in ("uint8", "uint32")
    },
    "numpy.typing.ArrayLike": f"{NUMPY}typing.html#numpy.typing.ArrayLike",
    "npt.NDArray": f"{NUMPY}typing.html#numpy.typing.NDArray",
    "pyarrow.lib.Table": "https://arrow.apache.org/docs/python/generated/pyarrow.Table.html",
    "pyroaring.BitMap": "https://pyroaringbitmap.readthedocs.io/en/stable/",
}


# Bases that only the library knows -> the class that users have.
BASES: Final = {"Operators": "clamor_ray.DataCollection", "Builder": "clamor_ray.Program"}


def _is_old(value: Any) -> bool:
    """Whether it is a name from before, which says what it is called now."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename == _renamed.__file__


@functools.cache
def public() -> dict[str, str]:
    """Each name that is ours -> the one that its page has, for private modules and `clamor`, too.

    Members of classes are not in it: `resolve` adds them.
    """
    found: dict[str, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in [*getattr(module, "__all__", ("Options",)), "open"]:
            value = getattr(module, name, None)
            if value is None or inspect.ismodule(value) or _is_old(value):
                continue
            full = f"{module_name}.{name}"
            private = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', name)}"
            for other in (full, private, full.replace("clamor_ray", "clamor", 1)):
                found.setdefault(other, found.get(private, full))
            if name != "open":  # Python's own is meant
                found.setdefault(name, found[private])
    return found


def resolve(name: str) -> str | None:
    """The name that a page has for a name of ours in a text; None if it is none of ours."""
    owner, member = name, ""
    while owner:
        if owner in public():
            return public()[owner] + member
        owner, _, last = owner.rpartition(".")
        member = f".{last}{member}"
    return None


def _exists(name: str) -> bool:
    """Whether a public name, or a member of a public class, is there at run time."""
    module_name = max((each for each in MODULES if name.startswith(f"{each}.")), key=len)
    value: Any = importlib.import_module(module_name)
    for part in name.removeprefix(f"{module_name}.").split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def _code(
    name: str, raw: str, text: str, line: int, inliner: Inliner, *_: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """What stands in single backticks: a link if it is a public name of ours, else code."""
    code = nodes.literal(raw, text, classes=["code"])
    ours = resolve(text.removesuffix("()"))
    if re.fullmatch(r"[\w.]+(\(\))?", text) and ours is not None and _exists(ours):
        link = addnodes.pending_xref(raw, code, refdomain="py", reftype="obj", reftarget=ours)
        return [link], []
    return [code], []


def _missing(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"]
    if name in OTHERS:
        return nodes.reference("", "", content, internal=False, refuri=OTHERS[name])
    objects = env.domains.python_domain.objects
    page_name = resolve(BASES.get(name, name))
    if page_name is None:  # a type that has a page under its private name
        ends = [each for each in objects if each.endswith(f".{name}")]
        page_name = ends[0] if len(ends) == 1 else None
    if page_name not in objects:
        return None
    found = objects[page_name]
    return make_refnode(
        app.builder, node["refdoc"], found.docname, found.node_id, content, page_name
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_role("ours", _code)
    app.config["default_role"] = "ours"
    app.connect("missing-reference", _missing)
    return {"parallel_read_safe": True}
