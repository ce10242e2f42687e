"""Groups of actors that reduce arrays: `clamor.collective.AllReduceGroup`.

The same class is at the top: `clamor.AllReduceGroup`. For `ray.util.collective` there is
`clamor_ray.ray_collective`.

Example:
    >>> clamor.collective.AllReduceGroup is clamor.AllReduceGroup
    True
"""

from clamor_ray._ring.group import AllReduceGroup

__all__ = ["AllReduceGroup"]
