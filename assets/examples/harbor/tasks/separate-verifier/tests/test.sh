#!/bin/bash
# This container has the artifact of the agent's, and a fresh copy of everything else.
[ -e /app/left-by-the-agent ] && exit 1
expected=$(grep -c ERROR /app/server.log)
[ "$(cat /app/answer.txt 2>/dev/null)" = "$expected" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
