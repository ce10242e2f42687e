#!/usr/bin/env bash
# Does the sdist in dist/ build with what a release of Debian has (its Python, its gcc), and work there?
#   release/debian.sh bookworm|trixie [MIRROR]
# As root, with mmdebstrap. The system stays in build/debian/; what is mounted there ends with this process.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 mirror=${2:-http://deb.debian.org/debian}
root=$PWD/build/debian/$suite

if [ ! -e "$root/usr/bin/python3" ]; then
    mkdir -p build/debian
    mmdebstrap --variant=apt --include=ca-certificates,gcc,libc6-dev,python3-dev,python3-venv \
        "$suite" "$root" "$mirror"
fi
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
rm -rf "$root/release"
mkdir "$root/release"
cp dist/*.tar.gz release/smoke.py "$root/release/"

# shellcheck disable=SC2016  # it is the inner shell that expands
unshare --mount --propagation private bash -euc '
    for at in /proc /sys /dev; do mount --rbind "$at" "$0$at"; done
    exec chroot "$0" bash -euc "
        cd /release
        python3 -m venv environment
        environment/bin/python -m pip install -q --disable-pip-version-check ./*.tar.gz
        exec env RAY_USAGE_STATS_ENABLED=0 timeout 300 environment/bin/python smoke.py"
' "$root"
