#!/usr/bin/env bash
# Checks versions.pml exhaustively: run.sh [-DNAME ...], the switches as in its head comment.
# Prints what the checker says. 0: no errors; 1: it found one; 2: it could not be run to its end.
# PAN_CFLAGS and PAN_ARGS: another search, for tests that have less time.
set -uo pipefail
model=$(cd "$(dirname "$0")" && pwd)/versions.pml
for tool in spin gcc; do
    command -v "$tool" >/dev/null || { echo "$tool is not installed (Debian: $tool)" >&2; exit 2; }
done
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2
# COLLAPSE stores states compressed and exactly: nothing is hashed away.
{ spin -a "$@" "$model" && gcc -w -DSAFETY -DMEMLIM=2048 ${PAN_CFLAGS:--O2 -DCOLLAPSE} -o pan pan.c; } || exit 2
./pan -m500000 ${PAN_ARGS:-} | tee said || exit 2
grep -q 'errors: [1-9]' said && exit 1
grep -q 'errors: 0' said || exit 2
if grep -Eq 'Search not completed|depth too small' said; then
    echo "the search was not exhaustive" >&2
    exit 2
fi
