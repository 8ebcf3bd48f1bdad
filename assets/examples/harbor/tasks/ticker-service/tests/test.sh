#!/bin/bash
count() { cat /app/ticks 2>/dev/null | wc -l; }
before=$(count)
for _ in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.2
    [ "$(count)" -gt "$before" ] && break
done
[ "$(count)" -gt "$before" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
