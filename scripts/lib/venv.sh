# Shared by scripts/quickstart and scripts/test: one virtual environment, installed once. To be sourced.
#
# PYTHON  interpreter to make the environment with (default: the one it has, or python3)
# VENV    folder of the environment (default: .venv in the checkout)

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
VENV=${VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 2
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'; }

need_python_3_11() { # INTERPRETER
    local hint="name another one: PYTHON=/path/to/python3.12 $0"
    "$1" -c '' 2>/dev/null || die "$1 does not run; install Python 3.11 or newer, or $hint"
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$1 is Python $(version_of "$1"), but 3.11 or newer is needed; $hint"
}

# Make $VENV unless it is there. One that does not start Python and pip (half-made, moved, its Python
# removed), or whose version is not that of a PYTHON asked for, is made anew.
make_venv() {
    local wanted=${PYTHON:-python3} found=""
    if "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1; then
        found=$(version_of "$VENV/bin/python")
        [ -n "${PYTHON:-}" ] || return 0
    fi
    need_python_3_11 "$wanted"
    [ "$found" != "$(version_of "$wanted")" ] || return 0
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        die "$VENV exists and is not a virtual environment; remove it, or choose another folder: VENV=DIR $0"
    fi
    say "Making $VENV with Python $(version_of "$wanted")."
    if "$wanted" -c 'import ensurepip' >/dev/null 2>&1; then
        "$wanted" -m venv --clear "$VENV"
    else
        # Debian and Ubuntu split ensurepip off; a pip that is there can put one into the environment.
        "$wanted" -m venv --clear --without-pip "$VENV"
        "$wanted" -m pip --python "$VENV/bin/python" install --quiet pip ||
            die "$wanted has neither ensurepip nor pip 22.3 or newer. On Debian and Ubuntu: apt install python3-venv"
    fi
}

# What the installation of EXTRA depends on. A file that stands still while this does is up to date.
stamp_of() { # EXTRA
    "$VENV/bin/python" - "$ROOT" "$1" <<'PY'
import hashlib
import pathlib
import platform
import sys

root, extra = sys.argv[1:]
project = hashlib.sha256(pathlib.Path(root, "pyproject.toml").read_bytes()).hexdigest()
print(f"checkout={root} extra={extra} python={platform.python_version()} pyproject={project}")
PY
}

# Make the environment and install the checkout with EXTRA ("" for none) into it, editable, unless that
# has been done. The stamp is written last: an installation that was cut off is done again.
install_once() { # EXTRA
    make_venv
    local spec="$ROOT${1:+[$1]}" stamp_file="$VENV/.installed${1:+-$1}" stamp quiet=--quiet
    stamp=$(stamp_of "$1")
    if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$stamp" ]; then
        return 0
    fi
    if [ -t 2 ]; then quiet=""; fi # a person sees pip's progress, a log does not
    say "Installing jaxseek${1:+[$1]} into $VENV. This happens once and takes a few minutes."
    "$VENV/bin/python" -m pip install $quiet --disable-pip-version-check --editable "$spec" >&2 ||
        die "pip could not install jaxseek${1:+[$1]}, see above. Running this again tries again."
    printf '%s\n' "$stamp" >"$stamp_file"
}
