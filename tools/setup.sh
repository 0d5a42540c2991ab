#!/bin/sh
# Build .venv with everything that `make` needs: uv by pip, Python 3.13 from PATH or pyenv (or by uv), pinned packages.
# Does nothing when it was built from the same pins already.
set -eu
cd "$(dirname "$0")/.."

pins=$(cat constraints.txt tools/setup.sh | cksum)
projects=$(cat pyproject.toml example_project/pyproject.toml | cksum)
if [ "$(cat .venv/.pins 2>/dev/null || true)" = "$pins $projects" ]; then
    exit 0
fi

runs_3_13() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 13))' >/dev/null 2>&1
}

find_python() {
    for candidate in python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python; do
        if runs_3_13 "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

find_uv() {
    if command -v uv >/dev/null 2>&1; then
        command -v uv
        return
    fi
    # An environment of its own: many systems refuse a pip install beside their own Python.
    python3 -m venv .uv >&2
    .uv/bin/python -m pip install --quiet --disable-pip-version-check uv >&2
    echo .uv/bin/uv
}

uv=$(find_uv)
case "$(cat .venv/.pins 2>/dev/null || true)" in
"$pins "*) ;; # the packages are there; only the projects changed
*)
    python=$(find_python)
    echo "Setting up .venv (Python ${python:-3.13, which uv will install}) ..." >&2
    rm -rf .venv
    "$uv" venv --quiet --python "${python:-3.13}" .venv
    # --no-deps: the pins are the whole set, DuckDB's override included (see pyproject.toml).
    "$uv" pip install --quiet --python .venv --no-deps --compile-bytecode -r constraints.txt
    echo "Done." >&2
    ;;
esac
"$uv" pip install --quiet --python .venv --no-deps -e . -e example_project
echo "$pins $projects" >.venv/.pins
