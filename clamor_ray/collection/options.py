"""How stages run: options of a collection, and their defaults from the environment. Pure."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from clamor_ray.collection.run.schedule import Policy, Scheduling

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Options:
    """How the stages of a collection run.

    Args:
        scheduling: "locality": tasks go where what they read last is cached, and wait
            `locality_wait_s` for that node; "deterministic": partition -> node by its number;
            "ray": Ray decides.
        locality_wait_s: seconds.
        speculation: whether a task that takes `speculation_multiplier` times the median of its
            stage gets a copy on another node.
        speculation_multiplier: at least 1.
        num_cpus: of each task, as Ray's.
        max_retries: of a task whose process or node dies, or whose result is lost.
        check: compare the results of tasks that are run again with those of before.
        progress: a bar for each stage; a line every few seconds where stderr is no terminal. False:
            neither.

    Raises:
        ValueError: A value that makes no sense; it says which.

    Example:
        >>> from clamor_ray.collection.options import Options
        >>> Options(scheduling="deterministic", speculation=False).max_retries
        4
    """

    scheduling: Scheduling = "locality"
    locality_wait_s: float = 1.0
    speculation: bool = True
    speculation_multiplier: float = 1.5
    num_cpus: float = 1
    max_retries: int = 4
    check: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.scheduling not in get_args(Scheduling):
            names = ", ".join(repr(name) for name in get_args(Scheduling))
            raise ValueError(f"scheduling is one of {names}, not {self.scheduling!r}")
        if not self.locality_wait_s >= 0:
            raise ValueError(f"locality_wait_s is 0 or more, not {self.locality_wait_s!r}")
        if not self.speculation_multiplier >= 1:
            raise ValueError(f"speculation_multiplier is 1 or more: {self.speculation_multiplier}")
        if not self.num_cpus >= 0:
            raise ValueError(f"num_cpus is 0 or more, not {self.num_cpus!r}")
        if self.max_retries < 0:
            raise ValueError(f"max_retries is 0 or more, not {self.max_retries!r}")

    @property
    def policy(self) -> Policy:
        """What of this the scheduler goes by."""
        return Policy(
            scheduling=self.scheduling,
            locality_wait_s=self.locality_wait_s,
            speculation=self.speculation,
            multiplier=self.speculation_multiplier,
        )

    def with_(self, **changes: Any) -> Options:
        """Changes some of the options.

        Args:
            changes: new values, by the names of the attributes.

        Returns:
            New options; these stay as they are.

        Raises:
            TypeError: There is no such option.
            ValueError: No such value.

        Example:
            >>> from clamor_ray.collection.options import Options
            >>> Options().with_(max_retries=0).max_retries
            0
        """
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise TypeError(
                    f"there is no option {name!r}; there are {', '.join(sorted(known))}"
                )
        return dataclasses.replace(self, **changes)


def _flag(name: str, value: str) -> bool:
    if value.lower() in TRUE:
        return True
    if value.lower() in FALSE:
        return False
    raise ValueError(f"{name} is 1 or 0, not {value!r}")


def from_env(environ: Mapping[str, str] = os.environ) -> Options:
    """Reads options from CLAMOR_SCHEDULING, CLAMOR_SPECULATION and CLAMOR_CHECK_OUTPUTS.

    Args:
        environ: variables and their values; the process's own by default.

    Returns:
        Options; what no variable sets has its default.

    Raises:
        ValueError: A variable has no known value.

    Example:
        >>> from clamor_ray.collection.options import from_env
        >>> from_env({"CLAMOR_SPECULATION": "0"}).speculation
        False
    """
    changes: dict[str, Any] = {}
    if "CLAMOR_SCHEDULING" in environ:
        changes["scheduling"] = environ["CLAMOR_SCHEDULING"]
    for name, option in [("CLAMOR_SPECULATION", "speculation"), ("CLAMOR_CHECK_OUTPUTS", "check")]:
        if name in environ:
            changes[option] = _flag(name, environ[name])
    return Options().with_(**changes)
