"""The registry's end, which is the session's: how a page server waits for it."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from clamor_ray._protocol.ray_state import GONE

logger = logging.getLogger("clamor_ray.page_server")

WATCH_PAUSE_S: Final = 1.0


def wait(registry: Any) -> None:
    """Returns when the registry is gone for good, or has been shut down. It may be restarted
    meanwhile, any number of times."""
    while True:
        try:
            # No deadline: this is the wait for the end itself.
            ray.get(registry.until_end.remote())
            break
        except GONE:
            break
        except RayError as failure:
            logger.warning("the registry does not answer: %r", failure)
        threading.Event().wait(WATCH_PAUSE_S)
    logger.info("the registry is gone: so is the session")


def remove_journal(directory: Path) -> None:
    """One that was killed has not removed its journal, and on its node the next would wait for it.
    Elsewhere there is none.

    Args:
        directory: Of the session's journal; its watcher leaves with it.
    """
    shutil.rmtree(directory, ignore_errors=True)
