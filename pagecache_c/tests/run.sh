#!/bin/sh
# Runs test programs side by side, long ones first, and counts. A program that is missing did not
# build: it failed. Output is shown for what did not pass, or with VERBOSE=1; what a program says
# that it skips is always shown.
# A program that changes a setting of the machine runs after the others, alone, and locks the setting's
# file while it does: those of other runs share a lock on it.
# Environment: RUNNER (a prefix), SECONDS_EACH, VERBOSE, JOBS (how many at once; one for each core),
# SETTING (that file).
here=$(dirname "$0")
ALONE='/test_huge_pages$'
SETTING=${SETTING:-/sys/kernel/mm/transparent_hugepage/shmem_enabled}

# One program, in a shell of its own: its verdict goes to a file, its report out in one piece.
if [ "$1" = --one ]; then
    name=$(basename "$2")
    log=$RESULTS/$name.log
    began=$(date +%s)
    lock=
    if [ -r "$SETTING" ] && command -v flock >/dev/null && ! echo "$2" | grep -q "$ALONE"; then
        lock="flock --close --shared $SETTING" # what the program leaves behind does not hold it
    fi
    if [ -x "$2" ]; then
        # shellcheck disable=SC2086  # RUNNER and lock are commands with arguments
        $lock timeout -k 5 "${SECONDS_EACH:-120}" $RUNNER "$2" >"$log" 2>&1
        status=$?
    else
        echo "it is not built" >"$log"
        status=not-built
    fi
    took="$(($(date +%s) - began)) s"
    verdict=failed
    case $status in
    0) verdict=passed said="ok   $name ($took)" ;;
    77) verdict=skipped said="SKIP $name: $(tail -n 1 "$log")" ;;
    not-built) said="FAIL $name" ;;
    124 | 137) said="FAIL $name (no end within ${SECONDS_EACH:-120} s)" ;;
    *) said="FAIL $name (exit status $status, $took)" ;;
    esac
    {
        echo "$said"
        if [ -n "$VERBOSE" ] || [ $verdict = failed ]; then
            sed 's/^/    /' "$log" | tail -n 60
        else
            grep '^skip ' "$log" | sed 's/^/    /'
        fi
    } >"$RESULTS/$name.report"
    cat "$RESULTS/$name.report"
    echo $verdict >"$RESULTS/$name.verdict"
    exit 0
fi

RESULTS=$(mktemp -d) || exit 1
export RESULTS RUNNER SECONDS_EACH VERBOSE SETTING
trap 'rm -rf "$RESULTS"' EXIT
# By measured seconds; who is not in the list may be the longest.
for program in "$@"; do
    seconds=$(awk -v name="$(basename "$program")" '$1 == name { print $2 }' "$here/seconds.txt")
    echo "${seconds:-9999} $program"
done | sort -rn | cut -d' ' -f2- >"$RESULTS/programs"
grep -v "$ALONE" "$RESULTS/programs" | xargs -r -d '\n' -n 1 -P "${JOBS:-$(nproc)}" "$0" --one
grep "$ALONE" "$RESULTS/programs" | xargs -r -d '\n' -n 1 "$0" --one

count() {
    cat "$RESULTS"/*.verdict 2>/dev/null | grep -cx "$1"
}
passed=$(count passed) failed=$(count failed) skipped=$(count skipped)
lost=$(($# - passed - failed - skipped))
if [ $lost -ne 0 ]; then
    echo "FAIL: no verdict of $lost of $# programs"
    failed=$((failed + lost))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
