#!/bin/sh
# Runs test programs one after the other and counts. A program that is missing did not build: it
# failed. Output is shown for what did not pass, or with VERBOSE=1.
# Environment: RUNNER (a prefix), SECONDS_EACH, VERBOSE.
passed=0 failed=0 skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    name=$(basename "$program")
    if [ ! -x "$program" ]; then
        echo "FAIL $name (not built)"
        failed=$((failed + 1))
        continue
    fi
    # shellcheck disable=SC2086  # RUNNER is a command with arguments
    timeout -k 5 "${SECONDS_EACH:-120}" $RUNNER "$program" >"$log" 2>&1
    status=$?
    case $status in
    0) passed=$((passed + 1)); echo "ok   $name" ;;
    77) skipped=$((skipped + 1)); echo "SKIP $name: $(tail -n 1 "$log")" ;;
    124 | 137) failed=$((failed + 1)); echo "FAIL $name (no end within ${SECONDS_EACH:-120} s)" ;;
    *) failed=$((failed + 1)); echo "FAIL $name (exit status $status)" ;;
    esac
    if [ -n "$VERBOSE" ] || { [ $status -ne 0 ] && [ $status -ne 77 ]; }; then
        sed 's/^/    /' "$log" | tail -n 60
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
