"""What the registry refuses. These classes cross processes, so both sides have them from here."""

from __future__ import annotations

from typing import Final

from clamor_ray import errors

# What a page server says that has no memory, no descriptors or no disk for it: another may have.
NO_ROOM: Final = (errors.OutOfMemoryError, errors.DescriptorLimitError, errors.NoSpaceError)


class RegistryError(Exception):
    """The registry refuses; the text says what and why."""


class NoAddresses(RegistryError):
    """No gap in the window is large enough."""


class TooLarge(NoAddresses):
    """The whole window is smaller."""


class NoSuchRegion(RegistryError):
    """An operation on a region that is not in the table."""


class IllegalTransition(RegistryError):
    """The region is not in a state that allows the operation."""


class NoSuchServer(RegistryError):
    """The server never registered, or is lost."""
