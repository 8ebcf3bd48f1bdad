#!/bin/bash
# Several rewards: their mean is the score.
has() { grep -qx "$1" /app/etc/server.conf && echo 1 || echo 0; }
port=$(has 'port = 8443')
host=$(has 'host = 0.0.0.0')
echo "{\"port\": $port, \"host\": $host}" > /logs/verifier/reward.json
