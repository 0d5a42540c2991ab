#!/bin/sh
# The test of Dagster's page needs Chromium. Install Debian's when there is none and we may.
set -eu
if command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the browser test ..." >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        chromium chromium-driver >/dev/null
else
    echo "Chromium and its driver are missing: install them for the browser test" >&2
    echo "(Debian: apt-get install chromium chromium-driver)." >&2
    exit 1
fi
