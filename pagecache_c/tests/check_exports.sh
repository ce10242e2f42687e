#!/bin/sh
# Lint as a test: the export list is the public headers'; nothing in the signal objects calls what
# a signal handler may not call.
# Environment: SIGNAL_OBJECTS (skipped while there are none), CC.
# A sanitizer's own calls (__asan_*, __ubsan_*, __tsan_*) are its business.
cd "$(dirname "$0")/.." || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
failed=0

# The compiler takes the comments out; a function is a pc_ name before a bracket at file level.
sed -n '/cdef-begin/,/cdef-end/p' pagecache.h pagecache_kernels.h pagecache_match.h | ${CC:-gcc} -E -P -x c - |
    grep -oE '\bpc_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u >"$scratch/header"
sed -n '/^global:/,/^local:/s/^ *\(pc_[a-z0-9_]*\);.*/\1/p' pagecache.map |
    sort >"$scratch/map"
if [ ! -s "$scratch/header" ]; then
    echo "no functions found between the cdef marks of the public headers"
    failed=1
fi
if ! diff "$scratch/header" "$scratch/map" >"$scratch/diff"; then
    echo "the public headers (<) and pagecache.map (>) differ:"
    cat "$scratch/diff"
    failed=1
fi

objects=
for object in $SIGNAL_OBJECTS; do
    [ -e "$object" ] && objects="$objects $object"
done
if [ -n "$objects" ]; then
    grep -v '^#' tests/signal_allow.txt | awk 'NF { print $1 }' >"$scratch/allowed"
    # shellcheck disable=SC2086  # a list
    nm $objects | awk 'NF == 3 && $2 ~ /[A-TV-Z]/ { print $3 }' >>"$scratch/allowed" # each other's
    sort -u -o "$scratch/allowed" "$scratch/allowed"
    # shellcheck disable=SC2086
    nm -u $objects | awk 'NF == 2 { print $2 }' |
        grep -vE '^(__(asan|ubsan|tsan|sanitizer)_|_GLOBAL_OFFSET_TABLE_$)' | sort -u |
        comm -23 - "$scratch/allowed" >"$scratch/forbidden"
    if [ -s "$scratch/forbidden" ]; then
        echo "$objects: calls that tests/signal_allow.txt does not list:"
        sed 's/^/  /' "$scratch/forbidden"
        failed=1
    fi
else
    echo "no signal object yet: only the export list was compared"
fi
exit $failed
