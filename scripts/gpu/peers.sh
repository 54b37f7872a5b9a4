#!/usr/bin/env bash
# Other trainers on one GPU, at most 8 minutes for all models, or 8 minutes for one that is named: peers.sh [125M | 1.3B | 8B-layers].
# Same weights, tokens and precision; whole runs in turns, ours and each peer once a round, until the time is used. A ratio passes by
# benchmarks/ratio_rule.py with at least 7 rounds: name one model and one or two peers a window, as in AGAINST="Liger;torchtitan".
# Without AGAINST it is the compiled plain loop. Peers take part where they are installed or their wheels are unpacked in .wheels/site.
# Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin peers "$@"
limit=150
[ $# -ne 1 ] || limit=455
peers="plain loop, compiled"
[ -z "$rehearse" ] || peers="plain loop"
IFS=';' read -ra against <<<"${AGAINST:-$peers}"
for name in 8B-layers 125M 1.3B; do
  setting="$name on a GPU"
  [ -z "$rehearse" ] || setting="rehearsal of a GPU"
  # a run and the table may take 60 s after the window
  stage "$name" "$limit" "$python" benchmarks/training.py --settings "$setting" --window $((limit - 60)) --pairs 9 \
    --peers .wheels --out "$W/$name.json" --against "${against[@]}"
done
finish
