"""The CPUs that a program has: other tasks and actors of Ray do not get them.

A placement group on each node has them, and nobody runs in it: the program's worker is beside it.
So they can be given back when the program has ended, while the worker has its results still. An
autoscaler sees them as used, and takes no node away that a program runs on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from clamor_ray import errors

logger = logging.getLogger("clamor_ray.recipes")

NODE_LABEL: Final = "ray.io/node-id"


class Reservations:
    """See the file's head. Safe from any thread.

    Args:
        program: Its name: those of the groups begin with it.
        is_on: Else nothing is reserved.
    """

    def __init__(self, program: str, is_on: bool) -> None:
        self._program = program
        self._is_on = is_on
        self._lock = threading.Lock()
        self._taken: dict[str, Any] = {}
        self._is_over = False
        self.is_paused = False

    def take_over(self) -> None:
        """Those of an earlier process."""
        begins = f"{self._program}-"
        for group in placement_group_table().values():
            name = str(group["name"])
            if name.startswith(begins) and group["state"] != "REMOVED":
                with self._lock:
                    self._taken[name.removeprefix(begins)] = get_placement_group(name)

    def ask(self, node_id: str, n_cpus: int) -> None:
        """Ray gives them when they are free."""
        with self._lock:
            is_off = self._is_over or self.is_paused or not self._is_on
            if not is_off and node_id not in self._taken:
                self._taken[node_id] = placement_group(
                    [{"CPU": n_cpus}],
                    name=f"{self._program}-{node_id}",
                    bundle_label_selector=[{NODE_LABEL: node_id}],
                )

    def wait(self, nodes: Mapping[str, int], timeout_s: float) -> None:
        """Returns when these are given.

        Args:
            nodes: Ray's ids, and how many CPUs were asked for.
            timeout_s: For all of them.

        Raises:
            WaitTimeoutError: Others have them.
        """
        until_s = time.monotonic() + timeout_s
        for node_id, n_cpus in nodes.items():
            with self._lock:
                group = self._taken.get(node_id)
            left_s = max(0.0, until_s - time.monotonic())
            if group is not None and not group.wait(left_s):
                self.give_back(node_id)
                raise errors.WaitTimeoutError(
                    f"The program wants {n_cpus} CPUs of node {node_id}, and other tasks, actors "
                    f"or programs have had them for {timeout_s:g} s.",
                    hint="End them; or run the program with fewer (cpus=1), on fewer nodes "
                    "(workers=1), or beside them (reserve=False).",
                )

    def give_back(self, node_id: str) -> None:
        """Others get them."""
        with self._lock:
            group = self._taken.pop(node_id, None)
        if group is not None:
            _remove(group)

    def give_back_all(self) -> None:
        """Others get all."""
        with self._lock:
            groups, self._taken = list(self._taken.values()), {}
        for group in groups:
            _remove(group)

    def keep(self, node_ids: Collection[str]) -> None:
        """Gives back those of all other nodes."""
        with self._lock:
            others = self._taken.keys() - set(node_ids)
        for node_id in others:
            self.give_back(node_id)

    def pause(self) -> None:
        """Gives all back until `resume`: tasks of Ray may have to make first partitions again."""
        self.is_paused = True
        self.give_back_all()

    def resume(self, nodes: Mapping[str, int]) -> None:
        """Asks for them again, and does not wait."""
        self.is_paused = False
        for node_id, n_cpus in nodes.items():
            self.ask(node_id, n_cpus)

    def end(self) -> None:
        """As `give_back_all`, for good."""
        self._is_over = True
        self.give_back_all()


def _remove(group: Any) -> None:
    try:
        remove_placement_group(group)
    except Exception as failure:  # any of Ray's: it goes with the controller then
        logger.warning("CPUs of a program are not given back: %r", failure)
