"""Run commands in containers: Docker's, Kubernetes', this machine's sandbox's, or those of your own."""
