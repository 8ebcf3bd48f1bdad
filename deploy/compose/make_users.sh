#!/bin/sh
# Make the run's database and its least-privileged users, with the passwords that make_secrets.py made.
#   MONGO_URI_FILE=/secrets/uri make_users.sh /secrets RUN_NAME
set -eu
for role in sampler trainer engine auditor annotator; do
  variable="AGENTRL_$(echo "$role" | tr '[:lower:]' '[:upper:]')_PASSWORD"
  export "$variable=$(cat "$1/agentrl_$role")"
done
exec agentrl db users --create --new_run --run_name "$2"
