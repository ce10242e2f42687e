"""How members of a group find each other."""

from __future__ import annotations

import time

from clamor_ray import errors
from clamor_ray._protocol.rendezvous import (
    Guest,
    Meeting,
    PlaceTaken,
    Rendezvous,
    TooManyRooms,
    Waiting,
    WrongSize,
)


class Meetings:
    """See the file's head. It answers at once: who waits asks again, and holds no place of the
    registry's.
    """

    def __init__(self) -> None:
        self._rendezvous = Rendezvous()

    def meet(self, group: str, size: int, guest: Guest) -> Meeting | Waiting:
        """All members of a group, or who is missing. Ray may repeat it.

        Args:
            group: its name.
            size: members that it has.
            guest: who asks; it is taken for gone when it does not ask again within seconds.

        Raises:
            CollectiveMismatchError: Members say different sizes.
            ExistsError: Another process came as the same member, or there are too many groups.
        """
        try:
            return self._rendezvous.come(group, size, guest, time.monotonic())
        except WrongSize as wrong:
            raise errors.CollectiveMismatchError(f"At the joining, {wrong}.") from None
        except TooManyRooms as full:
            raise errors.ExistsError(f"This group cannot form: {full}.") from None
        except PlaceTaken:
            raise errors.ExistsError(
                f"Another process came as member {guest.rank} of the group.",
                hint="Each member is one process; give every process a rank of its own.",
            ) from None

    def leave(self, group: str, visit: int) -> None:
        """Who waited gives up."""
        self._rendezvous.leave(group, visit)


class MeetingCalls:
    """Calls of the registry about groups; the registry has them beside its own."""

    _meetings: Meetings

    async def meet(self, group: str, size: int, guest: Guest) -> Meeting | Waiting:
        """See ``Meetings.meet``."""
        return self._meetings.meet(group, size, guest)

    async def leave_meeting(self, group: str, visit: int) -> None:
        """See ``Meetings.leave``."""
        self._meetings.leave(group, visit)
