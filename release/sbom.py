"""The bill of materials of a release (CycloneDX): what runs with it, and the C in its wheels.

    python -m release.sbom DIRECTORY ENVIRONMENT

DIRECTORY has the sdist and the wheels. ENVIRONMENT is the Python of an environment in which a wheel
of them was installed and nothing else: what pip chose there are the versions that were tested. A
wheel asks for ranges of them (its METADATA), so an installation may have others.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from release.archives import GLIBC, commit_epoch_s

SPEC = "1.6"
TOOLS_OF_AN_ENVIRONMENT = {"pip", "setuptools", "wheel"}


def _sha256(content: bytes) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}]


def _version_of_zig() -> str:
    command = [sys.executable, "-m", "ziglang", "version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _extensions(wheel: Path) -> list[dict[str, object]]:
    architecture = wheel.stem.rpartition(f"_{GLIBC.replace('.', '_')}_")[2]
    with zipfile.ZipFile(wheel) as archive:
        return [
            {
                "type": "library",
                "bom-ref": f"{wheel.name}#{name}",
                "name": name,
                "description": f"C extension in {wheel.name}; needs glibc {GLIBC} or newer",
                "hashes": _sha256(archive.read(name)),
                "properties": [
                    {"name": "clamor:architecture", "value": architecture},
                    {"name": "clamor:compiler", "value": f"zig cc {_version_of_zig()}"},
                ],
            }
            for name in sorted(archive.namelist())
            if name.endswith(".so")
        ]


def _c_sources(sdist: Path) -> list[dict[str, object]]:
    """Each C file that is compiled in: all are of this project, none is a copy of another's."""
    with tarfile.open(sdist) as archive:
        files = []
        for member in archive.getmembers():
            path = member.name.partition("/")[2]
            is_source = path.startswith("pagecache_c/") and path.endswith((".c", ".h"))
            content = archive.extractfile(member) if is_source else None
            if content is not None and not path.startswith("pagecache_c/tests/"):
                files.append(
                    {
                        "type": "file",
                        "bom-ref": path,
                        "name": path,
                        "hashes": _sha256(content.read()),
                    }
                )
    return files


def of_release(directory: Path, environment: Path) -> dict[str, object]:
    """The bill of materials, as JSON's types.

    Raises:
        ValueError: Its environment has not this release, or the directory has no wheel or sdist.
    """
    (sdist,) = directory.glob("*.tar.gz")
    wheels = sorted(directory.glob("*.whl"))
    version = sdist.name.removesuffix(".tar.gz").rpartition("-")[2]
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--spec-version", SPEC, "--short-PURLs", "--mc-type", "library", str(environment)]
    said = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(commit_epoch_s())},
    )
    bill = json.loads(said.stdout)
    installed = {part["name"]: part for part in bill["components"]}
    ours = installed.pop("clamor-ray", None)
    if ours is None or ours["version"] != version or not wheels:
        raise ValueError(
            f"{environment} has clamor-ray {ours and ours['version']}, and {directory} has "
            f"{len(wheels)} wheels of {version}"
        )
    # Where it was installed from is this machine's.
    ours.pop("externalReferences", None)
    ours["purl"] = f"pkg:pypi/clamor-ray@{version}"
    natives = [part for wheel in wheels for part in _extensions(wheel)]
    sources = {"type": "library", "bom-ref": "pagecache_c", "name": "pagecache_c"}
    sources |= {"version": version, "licenses": [{"license": {"id": "Apache-2.0"}}]}
    sources["components"] = _c_sources(sdist)
    bill["metadata"]["component"] = ours
    bill["components"] = [
        part for name, part in sorted(installed.items()) if name not in TOOLS_OF_AN_ENVIRONMENT
    ]
    bill["components"] += [*natives, sources]
    refs = {part["bom-ref"] for part in bill["components"]} | {ours["bom-ref"]}
    edges = {edge["ref"]: edge for edge in bill["dependencies"] if edge["ref"] in refs}
    for edge in edges.values():
        edge["dependsOn"] = [ref for ref in edge.get("dependsOn", []) if ref in refs]
    natives_refs = [part["bom-ref"] for part in natives]
    edges[ours["bom-ref"]]["dependsOn"] += natives_refs
    edges |= {ref: {"ref": ref, "dependsOn": ["pagecache_c"]} for ref in natives_refs}
    bill["dependencies"] = [edges[ref] for ref in sorted(edges)]
    return bill


def write(directory: Path, environment: Path) -> Path:
    """Writes it into the directory, checked against CycloneDX's schema."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill = of_release(directory, environment)
    text = json.dumps(bill, indent=2) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise SystemExit(f"the bill of materials is not CycloneDX {SPEC}: {wrong}")
    component = bill["metadata"]["component"]  # type: ignore[index]
    out = directory / f"clamor_ray-{component['version']}.cdx.json"
    out.write_text(text)
    return out


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(write(Path(sys.argv[1]), Path(sys.argv[2])))
