#!/bin/bash
# The reward of a test is 1 or 0, and a test that fails is no failure of the verifier.
if [ "$(cat /app/greeting.txt 2>/dev/null)" = hello ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
