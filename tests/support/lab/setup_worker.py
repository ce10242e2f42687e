"""What Ray starts a worker with that has a runtime environment: here, without importing Ray.

Ray's own script of this name imports Ray, sets the variables of the environment, and becomes the
worker, which imports Ray again: half of what such a worker costs at its start. This one does the
same to an environment that has only variables, and leaves every other to Ray's.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import MutableMapping

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="


def command(arguments: list[str], environment: MutableMapping[str, str]) -> list[str] | None:
    """The worker's command; None where that is Ray's script to know.

    Args:
        arguments: of this script.
        environment: of this process, which gets the variables.
    """
    texts = [each[len(CONTEXT) :] for each in arguments if each.startswith(CONTEXT)]
    context = json.loads(texts[0]) if len(texts) == 1 else {}
    variables = context.pop("env_vars", None)
    executable = context.pop("py_executable", None)
    if not variables or executable != sys.executable or any(context.values()):
        return None
    if f"{LANGUAGE}PYTHON" not in arguments:
        return None
    for name, value in variables.items():
        expanded = os.path.expandvars(value)
        environment[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", expanded)
    return [executable, *(each for each in arguments if not each.startswith((CONTEXT, LANGUAGE)))]


if __name__ == "__main__":
    worker = command(sys.argv[1:], os.environ)
    if worker is not None:
        os.execv(os.environ.get("LAB_LAUNCHER", worker[0]), worker)
    import runpy

    # Ray's, which reads the same arguments.
    runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
