#!/bin/sh
# Runs test programs side by side, long ones first, and counts. A program that is missing did not
# build: it failed. Output is shown for what did not pass, or with VERBOSE=1; what a program says
# that it skips is always shown.
#   run.sh PROGRAM ...                   runs these
#   run.sh --list LABEL PROGRAM ...      says them as lines for the next one, long ones first
#   run.sh --stream N                    runs N programs, that standard input names as they are built
# A program that changes a setting of the machine runs after the others, alone, and locks the setting's
# file while it does: those of other runs share a lock on it.
# Environment: RUNNER (a prefix; RUNNER_tsan: where the label is tsan), SECONDS_EACH, VERBOSE, JOBS (how
# many at once; one for each core), SETTING (that file).
here=$(dirname "$0")
ALONE='*/test_huge_pages' # a pattern of the shell
SETTING=${SETTING:-/sys/kernel/mm/transparent_hugepage/shmem_enabled}

# A line is a name, a tab, and a program.
line_of() {
    printf '%s\t%s\n' "${1:+$1/}$(basename "$2")" "$2"
}

# By measured seconds; who is not in the list may be the longest.
long_ones_first() {
    awk -F '\t' 'NR == FNR { split($0, of, " "); seconds[of[1]] = of[2]; next }
                 { name = $1; sub(".*/", "", name); print (name in seconds ? seconds[name] : 9999) "\t" $0 }' \
        "$here/seconds.txt" - | sort -s -rn | cut -f2-
}

# One program, in a shell of its own: its verdict goes to a file, its report out in one piece.
if [ "$1" = --one ]; then
    tab=$(printf '\t')
    name=${2%%"$tab"*} program=${2#*"$tab"}
    said_to=$RESULTS/$(echo "$name" | tr / .)
    case $name in
    tsan/*) RUNNER=$RUNNER_tsan ;;
    esac
    log=$said_to.log
    began=$(date +%s)
    lock=
    case $program in
    $ALONE) ;;
    *) if [ -r "$SETTING" ] && command -v flock >/dev/null; then
        lock="flock --close --shared $SETTING" # what the program leaves behind does not hold it
    fi ;;
    esac
    if [ -x "$program" ]; then
        # shellcheck disable=SC2086  # RUNNER and lock are commands with arguments
        $lock timeout -k 5 "${SECONDS_EACH:-120}" $RUNNER "$program" >"$log" 2>&1
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
    } >"$said_to.report"
    cat "$said_to.report"
    echo $verdict >"$said_to.verdict"
    exit 0
fi

label=
[ "$1" = --list ] && label=$2 && shift 2
if [ "$1" = --stream ]; then
    expected=$2
else
    expected=$#
    lines=$(for program in "$@"; do line_of "$label" "$program"; done | long_ones_first)
fi
[ -n "$label" ] && echo "$lines" && exit

RESULTS=$(mktemp -d) || exit 1
export RESULTS RUNNER RUNNER_tsan SECONDS_EACH VERBOSE SETTING
trap 'rm -rf "$RESULTS"' EXIT
# The shell reads line by line, where some tools wait for the end.
if [ "$1" = --stream ]; then cat; else echo "$lines"; fi |
    while IFS= read -r line; do
        case $line in
        $ALONE) echo "$line" >>"$RESULTS/alone" ;;
        *) echo "$line" ;;
        esac
    done |
    xargs -r -d '\n' -n 1 -P "${JOBS:-$(nproc)}" "$0" --one
[ -e "$RESULTS/alone" ] && xargs -r -d '\n' -n 1 "$0" --one <"$RESULTS/alone"

count() {
    cat "$RESULTS"/*.verdict 2>/dev/null | grep -cx "$1"
}
passed=$(count passed) failed=$(count failed) skipped=$(count skipped)
lost=$((expected - passed - failed - skipped))
if [ $lost -ne 0 ]; then
    echo "FAIL: no verdict of $lost of $expected programs"
    failed=$((failed + lost))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
