"""Makes clamor-ray.json, the profile of ../../seccomp: a runtime's default, and userfaultfd.

    python k8s/nodes/seccomp/generate.py [/usr/share/containers/seccomp.json]

The default of containers-common (Apache-2.0) says for which capabilities and processors a rule is
meant. CRI-O reads that, containerd does not: it would apply the rules of all of them. So the
profile has what is left of them for a container without capabilities, on x86-64 and arm64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

DEFAULT: Final = Path("/usr/share/containers/seccomp.json")
PROFILE: Final = Path(__file__).with_name("clamor-ray.json")
ADDED: Final = ("userfaultfd",)
PROCESSORS: Final = {"amd64", "arm64"}
ARCHITECTURES: Final = [
    "SCMP_ARCH_X86_64",
    "SCMP_ARCH_X86",
    "SCMP_ARCH_X32",
    "SCMP_ARCH_AARCH64",
    "SCMP_ARCH_ARM",
]
ALLOW: Final = "SCMP_ACT_ALLOW"


def _is_ours(rule: dict[str, Any]) -> bool:
    includes = rule.get("includes") or {}
    processors = set(includes.get("arches") or PROCESSORS) & PROCESSORS
    return not includes.get("caps") and bool(processors)


def profile(default: dict[str, Any]) -> dict[str, Any]:
    """As the OCI has it, which is what kubelets hand to any runtime.

    Args:
        default: the profile as containers-common writes it.
    """
    allowed: set[str] = set(ADDED)
    others = []
    for rule in filter(_is_ours, default["syscalls"]):
        if rule["action"] == ALLOW and not rule.get("args"):
            allowed.update(rule["names"])
            continue
        kept = {"names": sorted(set(rule["names"]) - set(ADDED)), "action": rule["action"]}
        kept |= {key: rule[key] for key in ("errnoRet", "args") if rule.get(key)}
        if kept["names"] and kept not in others:
            others.append(kept)
    return {
        "defaultAction": default["defaultAction"],
        "defaultErrnoRet": default["defaultErrnoRet"],
        "architectures": ARCHITECTURES,
        "syscalls": [{"names": sorted(allowed), "action": ALLOW}, *others],
    }


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    PROFILE.write_text(json.dumps(profile(json.loads(source.read_text())), indent=1) + "\n")
