#!/usr/bin/env bash
# Checks a model exhaustively: run.sh [MODEL.pml] [-DNAME ...], the switches as in its head comment.
# Without a name it is versions.pml.
# Prints what the checker says. 0: no errors; 1: it found one; 2: it could not be run to its end.
# PAN_CFLAGS and PAN_ARGS: another search, for tests that have less time.
set -uo pipefail
name=versions.pml
if [[ ${1:-} == *.pml ]]; then
    name=$1
    shift
fi
model=$(cd "$(dirname "$0")" && pwd)/$name
for tool in spin gcc; do
    command -v "$tool" >/dev/null || { echo "$tool is not installed (Debian: $tool)" >&2; exit 2; }
done
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2
spin -a "$@" "$model" || exit 2
cflags=-DSAFETY arguments=
if [[ -e _spin_nvr.tmp ]]; then # a formula of what becomes true in the end: cycles are searched too
    cflags= arguments=-a
fi
# COLLAPSE stores states compressed and exactly: nothing is hashed away.
gcc -w $cflags -DMEMLIM=2048 ${PAN_CFLAGS:--O2 -DCOLLAPSE} -o pan pan.c || exit 2
./pan -m500000 $arguments ${PAN_ARGS:-} | tee said || exit 2
grep -q 'errors: [1-9]' said && exit 1
grep -q 'errors: 0' said || exit 2
if grep -Eq 'Search not completed|depth too small' said; then
    echo "the search was not exhaustive" >&2
    exit 2
fi
