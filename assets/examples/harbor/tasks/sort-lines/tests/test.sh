#!/bin/bash
printf 'fig\nkiwi\nlime\npear\n' > /tmp/expected
reward=0
[ "$(cat /app/sorted.txt 2>/dev/null)" = "$(cat /tmp/expected)" ] && reward=1
echo $reward > /logs/verifier/reward.txt
