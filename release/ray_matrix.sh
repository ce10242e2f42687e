#!/usr/bin/env bash
# Does the wheel in dist/ work with the oldest and the newest Ray? Each version has an environment of its
# own; in it runs smoke.py, and then some tests, from a copy of tests/ beside which there is no library.
#   [WHEEL=path] release/ray_matrix.sh [RAY ...]     versions as pip's `ray==` takes them; "newest" is the newest
# One line says the outcome of each. It ends with 1 if one of them failed.
set -uo pipefail
cd "$(dirname "$0")/.."

export RAY_USAGE_STATS_ENABLED=0
# Each process of Ray would compile all of it anew.
unset PYTHONDONTWRITEBYTECODE
wheel=${WHEEL:-$(echo "$PWD"/dist/*_"$(uname -m)".whl)}
# Sessions, reads, commits and deaths; and what the library asks of Ray beside its documented interface.
tests=(tests/library/test_variables.py tests/cluster/test_ray_nodes.py tests/library/test_in_flight.py
    tests/library/test_task_context.py tests/cluster/test_failures.py)
failed=0

[ $# -gt 0 ] || set -- "2.50.*" newest
for ray in "$@"; do
    place=build/ray-matrix/${ray%.\*}
    rm -rf "$place/run"
    mkdir -p "$place/run"
    python=$PWD/$place/environment/bin/python
    wanted="ray[default]==$ray"
    [ "$ray" = newest ] && wanted="ray[default]"
    if ! { { [ -x "$python" ] || python3 -m venv "$place/environment"; } &&
        "$python" -m pip install -q --disable-pip-version-check "$wheel" "$wanted" \
            hypothesis pandas psutil pytest pytest-timeout scipy &&
        "$python" -m pip install -q --disable-pip-version-check --force-reinstall --no-deps "$wheel"; }; then
        echo "ray $ray: not installed"
        failed=1
        continue
    fi
    version=$("$python" -c 'import ray; print(ray.__version__)')
    cp -r tests release/smoke.py pyproject.toml "$place/run"
    smoke=failed
    (cd "$place/run" && timeout 300 "$python" smoke.py) && smoke=passed
    (cd "$place/run" && timeout 1500 "$python" -m pytest -q -p no:cacheprovider "${tests[@]}") \
        >"$place/tests.txt" 2>&1
    status=$?
    tail -n 30 "$place/tests.txt"
    echo "ray $version: smoke $smoke, tests: $(tail -n 1 "$place/tests.txt")"
    if [ "$smoke" = failed ] || [ $status -ne 0 ]; then failed=1; fi
done
exit $failed
