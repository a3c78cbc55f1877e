#!/bin/sh
# Runs what this bundle holds, on a machine that needs no Rust:
#   run.sh test [FILTER]           the conformance tests
#   run.sh bench [FILTER]          the benchmarks
#   run.sh bench [FILTER] --peers  the same after other libraries, which need a python3 with PyTorch
#   run.sh peers ARGS...           other libraries alone: --help says what
#   run.sh structures ARGS...      the command line
# The bundle holds assets/, or lies in target/ of a checkout that does.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
if [ -d "$here/assets" ]; then
    root=$here
elif [ -d "$here/../../assets" ]; then
    root=$(CDPATH='' cd -- "$here/../.." && pwd)
else
    echo "run.sh: no assets in $here nor two folders above it" >&2
    exit 2
fi
STRUCTURES_ASSETS=$root/assets
export STRUCTURES_ASSETS
cd "$root"

task=${1:-}
[ $# -eq 0 ] || shift
case $task in
test) exec "$here/conformance" "$@" ;;
peers) exec python3 "$here/peers/peers.py" "$@" ;;
structures) exec "$here/structures" "$@" ;;
bench)
    peers=
    for word; do
        shift
        if [ "$word" = --peers ]; then peers=$here; else set -- "$@" "$word"; fi
    done
    if [ -n "$peers" ]; then
        python3 "$here/peers/peers.py" --out "$peers/peers.json"
        python3 "$here/peers/decode.py" --out "$peers/decode.json"
        STRUCTURES_PEERS=$peers/peers.json:$peers/decode.json
        export STRUCTURES_PEERS
    fi
    exec "$here/bench" --bench "$@"
    ;;
*)
    echo "usage: run.sh test|bench|peers|structures ARGS..." >&2
    exit 2
    ;;
esac
