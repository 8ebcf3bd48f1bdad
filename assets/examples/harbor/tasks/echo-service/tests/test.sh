#!/bin/bash
reward=0
echo "ping 41" > /app/run/request
for _ in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.2
    [ "$(cat /app/run/reply 2>/dev/null)" = "pong 41" ] && reward=1 && break
done
echo $reward > /logs/verifier/reward.txt
