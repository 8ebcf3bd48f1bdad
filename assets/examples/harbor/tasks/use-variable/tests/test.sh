#!/bin/bash
[ "$(cat /srv/work/out.txt 2>/dev/null)" = "$EXPECTED" ] && reward=1.0 || reward=0.0
echo $reward > /logs/verifier/reward.txt
