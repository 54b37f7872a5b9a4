# Sourced by quickstart.sh and test.sh. Sets $root (the checkout) and $python (an interpreter that has the versions of
# requirements/pinned.txt): the one on PATH if it has them already, else .venv, which is made or repaired here.
# With lowest_versions=yes it is .venv-floor, with the lowest versions that pyproject.toml allows of our dependencies, Triton and what runs the tests.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lowest_versions=${lowest_versions:-}
pins="$root/requirements/pinned.txt"
venv="$root/.venv${lowest_versions:+-floor}"
# lowest_pins: prints the lower bounds of our dependencies, of Triton and of what runs the tests, as name==version.
lowest_pins() {
    grep -oE '"(torch|numpy|xxhash|PyYAML|Jinja2|triton|pytest|hypothesis)>=[0-9.]+' "$root/pyproject.toml" | sed 's/^"//; s/>=/==/'
}

if [ -n "$lowest_versions" ]; then
    pins="$venv.txt"
    lowest_pins >"$pins"
fi
unfinished="$venv/unfinished-installation"  # present while pip writes; found later, it means that pip was interrupted
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export OMP_WAIT_POLICY=passive  # threads that spin while they wait slow everything down on a busy machine

fail() {
    printf '%s\n' '' "$@" >&2
    exit 1
}

# has_pins PYTHON: does it have every pinned version? Another torch >= 2.11 counts when it sees a GPU, with the Triton that it came with, unless
# the lowest versions are asked for.
has_pins() {
    "$1" - "$pins" "$lowest_versions" <<'PYTHON' 2>/dev/null
import re, sys
from importlib.metadata import version
for line in open(sys.argv[1]):
    name, _, pinned = line.strip().removesuffix(" \\").partition("==")  # hashes follow on lines of their own
    if not pinned or line.startswith("#"):
        continue
    installed, pinned = (re.sub(r"(\.0)+$", "", each) for each in (version(name).split("+")[0], pinned))  # 8 is 8.0.0
    if installed == pinned:
        continue
    if sys.argv[2] or name not in ("torch", "triton") or tuple(map(int, version("torch").split(".")[:2])) < (2, 11):
        sys.exit(1)
    import torch
    if not torch.cuda.is_available():
        sys.exit(1)
PYTHON
}

# gpu_torch PYTHON: prints the version of its torch when that is >= 2.11 and sees a GPU; fails where the lowest versions are asked for.
gpu_torch() {
    [ -z "$lowest_versions" ] || return 1
    "$1" -c 'import torch; v = torch.__version__; assert tuple(map(int, v.split(".")[:2])) >= (2, 11) and torch.cuda.is_available(); print(v)' 2>/dev/null
}

# torch_folder PYTHON: prints the folder that holds its torch.
torch_folder() {
    "$1" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])'
}

# find_python: prints the interpreter to build .venv from: one with a torch that sees a GPU, else the first suitable one.
find_python() {
    local candidate first=
    for candidate in python3 python3.12 python3.11 python3.13; do
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
        first=${first:-$candidate}
        if gpu_torch "$candidate" >/dev/null; then
            first=$candidate
            break
        fi
    done
    [ -n "$first" ] && echo "$first"
}

# install_pins PYTHON [TORCH]: installs the pins, each file of which must have a digest that is listed there. torch comes after them, by version:
# its builds (CPU, CUDA, a site's own) are other files, and pip takes the one that its indexes offer here. PyPI's CUDA build requires one version of
# Triton; where that is not the pinned one, pip takes the CPU build from PyTorch's index. With TORCH, a torch that is there already, neither torch nor
# Triton is installed.
install_pins() {
    local hashed="$venv/hashed.txt" versions="$venv/versions.txt"
    awk -v left="^(torch${2:+|triton})==" '/^[^ #]/ { drop = $0 ~ left } !drop' "$pins" >"$hashed"
    ! grep -q sha256 "$hashed" || run_pip "$1" --require-hashes -r "$hashed" || pip_failed
    if [ -z "${2:-}" ]; then
        grep -o '^[^ #]*==[^ ]*' "$pins" >"$versions"
        run_pip "$1" -r "$versions" || {
            cp "$venv/pip.log" "$venv/pip-first.log"
            echo "  pip found no torch for the pinned Triton (log: $venv/pip-first.log): trying PyTorch's CPU build, which sees no GPU." \
                "For GPUs install torch for the python3 on PATH, delete $(basename "$venv") and run this again."
            run_pip "$1" --extra-index-url https://download.pytorch.org/whl/cpu -r "$versions" || pip_failed
        }
    fi
}

pip_failed() {
    fail "$(tail -n 15 "$venv/pip.log")" \
        "pip could not install ${pins#"$root/"} (whole log: $venv/pip.log)." \
        "Without a network: put the wheels into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=that-folder. Behind a mirror: set PIP_INDEX_URL," \
        "and PIP_EXTRA_INDEX_URL to a mirror of https://download.pytorch.org/whl/cpu." \
        "Where a mirror serves other files than those of requirements/pinned.txt, pip refuses them: use one that serves the original files." \
        "Then run this again; it continues from here."
}

# run_pip PYTHON FLAG... FILE: pip install, with its progress through the packages of FILE; returns pip's exit code.
run_pip() {
    local log="$venv/pip.log" total collected installed start=$SECONDS state pid status=0
    total=$(grep -c '==' "${!#}")
    "$1" -m pip install --only-binary :all: --no-compile --progress-bar off "${@:2}" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill $pid 2>/dev/null; exit 130' INT TERM
    while kill -0 $pid 2>/dev/null; do
        collected=$(grep -cE '^(Collecting|Requirement already satisfied)' "$log")
        state="found $((collected < total ? collected : total)) of $total packages"
        if grep -q '^Installing collected' "$log"; then
            installed=$(ls -d "$venv"/lib/python3*/site-packages/*.dist-info 2>/dev/null | wc -l)
            state="installed $((installed < total ? installed : total)) of $total packages"
        fi
        if [ -t 1 ]; then
            printf '\r  %s, %d s ' "$state" $((SECONDS - start))
        elif [ $(((SECONDS - start) % 10)) -eq 5 ]; then
            printf '  %s, %d s\n' "$state" $((SECONDS - start))
        fi
        sleep 1
    done
    wait $pid || status=$?
    trap - INT TERM
    [ -t 1 ] && printf '\n'
    return $status
}

make_environment() {
    local base kept
    if command -v flock >/dev/null; then  # two scripts started at once must not write the same environment
        exec 9<"$root"
        flock -n 9 || { echo "Another installation is writing $(basename "$venv"); waiting for it." && flock 9; }
    fi
    if [ ! -e "$unfinished" ] && has_pins "$venv/bin/python"; then
        return  # another script has made it
    fi
    if [ -e "$unfinished" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python) || fail "No Python 3.11, 3.12 or 3.13 on PATH." \
            "Install one (apt install python3.11 python3.11-venv, conda create -n py311 python=3.11, module load python) and run this again."
        kept=$(gpu_torch "$base" || true)
        echo "Making $(basename "$venv") from $("$base" -c 'import sys; print(sys.executable, sys.version.split()[0])')${kept:+, keeping its torch $kept}"
        "$base" -m venv --clear "$venv" || fail "python -m venv failed." \
            "On Debian and Ubuntu its package is separate: apt install python3-venv. Then run this again."
        if [ -n "$kept" ]; then
            torch_folder "$base" >"$(echo "$venv"/lib/python3*/site-packages)/borrowed.pth"  # seen behind the environment's own packages
        fi
    else
        kept=$(gpu_torch "$venv/bin/python" || true)
        echo "Bringing $(basename "$venv") to the pinned versions${kept:+, keeping its torch $kept}"
    fi
    touch "$unfinished"
    install_pins "$venv/bin/python" "$kept"
    rm "$unfinished"
    has_pins "$venv/bin/python" || fail "$venv does not hold the pinned versions after the installation." "Delete it (rm -r $venv) and run this again."
}

python=$(command -v python3 || true)
if [ -z "$python" ] || ! has_pins "$python"; then
    python="$venv/bin/python"
    if [ -e "$unfinished" ] || ! has_pins "$python"; then
        (set +e && make_environment)
    fi
fi
