"""Who goes first where the kernel runs out of memory: not the processes that hold what all use.

Ray gives its workers an ``oom_score_adj`` of 1000, so that they go before its own daemons, and all
that they start inherits it. The page server, the registry, the keeper and the watcher are no tasks
that are run again for nothing: the first two lower it before they start the others.

Without CAP_SYS_RESOURCE the kernel lets nobody go below what a process with it has set last.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

WANTED: Final = -900  # -1000 would be never: somebody must go where these are what grows
_PATH: Final = Path("/proc/self/oom_score_adj")


def _is_accepted(score: int, path: Path) -> bool:
    try:
        path.write_text(str(score))
    except OSError:
        return False
    return True


def lower(path: Path = _PATH) -> int:
    """Lowers this process's score as far as the kernel lets it, and says so in the log.

    Args:
        path: The kernel's file.

    Returns:
        The score now.
    """
    logger = logging.getLogger("clamor_ray")
    try:
        now = int(path.read_text())
    except OSError as failure:
        logger.warning("the kernel does not say who goes first without memory: %r", failure)
        return 0
    if now <= WANTED:
        return now
    if _is_accepted(WANTED, path):
        logger.info("oom_score_adj is %d, was %d", WANTED, now)
        return WANTED
    least, most = WANTED, now  # the lowest that is accepted lies in (least, most]
    while most - least > 1:
        middle = (least + most) // 2
        if _is_accepted(middle, path):
            most = middle
        else:
            least = middle
    logger.log(
        logging.WARNING if most > 0 else logging.INFO,
        "oom_score_adj is %d, and the kernel lets it be no lower without CAP_SYS_RESOURCE: where "
        "this node runs out of memory, this process may be the first that the kernel ends",
        most,
    )
    return most
