#!/usr/bin/env bash
# Runs all that needs a GPU, what tells most first: tests/gpu.sh FOLDER [STEP...]
#
# From a bare checkout: PYTHON (python3, unless it is set) must have torch for CUDA, cupy, wrapt,
# numpy, rich, pytest and hypothesis; the models of `steps` are left out whose package is missing.
# Each step's log, what it measured and summary.txt are written to FOLDER while it runs, at most 8
# files; what an earlier call left there is kept. A step that fails, or takes longer than
# STEP_SECONDS (480), does not stop the next ones. The exit code is 0 where every step of this call
# passed, and was not skipped as a whole.
set -uo pipefail

STEPS=(
    machine kernels benchmark steps others
    sanitizer-memcheck sanitizer-racecheck sanitizer-initcheck sanitizer-synccheck
)
VERSIONS='
import sys, torch, cupy
print("Python", sys.version.split()[0], "torch", torch.__version__, "cupy", cupy.__version__)
print(torch.cuda.get_device_name(), "compute capability", torch.cuda.get_device_capability())
'

usage() {
    echo "usage: tests/gpu.sh FOLDER [STEP...]; the steps: ${STEPS[*]}; got $*" >&2
    exit 2
}

[ $# -ge 1 ] || usage nothing
mkdir -p "$1" || exit 2
folder=$(cd "$1" && pwd)
shift
for step in "$@"; do
    [[ " ${STEPS[*]} " == *" $step "* ]] || usage "$step"
done
chosen=("$@")
[ $# -gt 0 ] || chosen=("${STEPS[@]}")
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-python3}
limit=${STEP_SECONDS:-480}
tests=("$python" -m pytest -m gpu -p no:benchmark -p no:cacheprovider)
export PYTHONUNBUFFERED=1  # what is printed is in the log also where a step is cut off

# Sets the array `command` to what a step runs.
choose() {
    case $1 in
        machine) command=("$python" -c "$VERSIONS") ;;
        kernels) command=("${tests[@]}" -v tests/kernels --ignore tests/kernels/test_sanitizer.py) ;;
        benchmark) command=("$python" tests/benchmarks/kernels.py --out "$folder") ;;
        # with what it has not begun a minute before the limit, another call goes on
        steps)
            command=("$python" tests/benchmarks/step.py --out "$folder")
            command+=(--minutes "$(((limit - 60) / 60))")
            ;;
        others) command=("${tests[@]}" -v tests --ignore tests/kernels) ;;
        sanitizer-*) command=("${tests[@]}" -rP tests/kernels/test_sanitizer.py -k "${1#*-}") ;;
    esac
}

# What is known of each step; of those not chosen, what an earlier call wrote.
declare -A result=()
if [ -f "$folder/summary.txt" ]; then
    while read -r step said; do
        [ "$said" = running ] && said="cut off"
        result[$step]=$said
    done < "$folder/summary.txt"
fi

# So that at most 8 files come out, with three that the benchmarks write.
log_of() {
    case $1 in
        machine | benchmark | steps) echo "$folder/benchmark.log" ;;
        sanitizer-*) echo "$folder/sanitizer.log" ;;
        *) echo "$folder/$1.log" ;;
    esac
}

# The file is complete at any time.
summarize() {
    for step in "${STEPS[@]}"; do
        printf '%-20s %s\n' "$step" "${result[$step]:-not run}"
    done > "$folder/summary.new"
    mv "$folder/summary.new" "$folder/summary.txt"
}

pid=
cut_off() {
    [ -n "$pid" ] && kill "$pid" 2> /dev/null && wait "$pid"
    result[$current]="cut off"
    summarize
    exit 143
}

exit_code=0
current=${chosen[0]}
trap cut_off TERM INT
for current in "${chosen[@]}"; do
    log=$(log_of "$current")
    choose "$current"
    result[$current]=running
    summarize
    began=$SECONDS
    echo "=== $current: ${command[*]}" >> "$log"
    timeout --kill-after=20 "$limit" "${command[@]}" >> "$log" 2>&1 &
    pid=$!
    wait "$pid"
    code=$?
    pid=
    case $code in
        0) said=passed ;;
        124 | 137) said="timed out" ;;
        *) said="exit code $code" ;;
    esac
    last=$(tail -n 1 "$log" | cut -c 1-120)
    [[ $said = passed && $last = *skipped* && $last != *passed* ]] && said="all skipped"
    [ "$said" = passed ] || exit_code=1
    echo "=== $current: $said" >> "$log"
    result[$current]=$(printf '%-13s %4d s  %s' "$said" $((SECONDS - began)) "$last")
    summarize
    echo "$current: ${result[$current]}"
done
exit "$exit_code"
