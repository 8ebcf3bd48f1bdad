"""Record what a process does as OpenTelemetry spans and send them to a collector or to MLflow."""
