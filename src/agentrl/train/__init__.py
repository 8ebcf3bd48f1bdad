"""The trainer: training step, optimizer, checkpoints, and the loop around them; supervised fine-tuning."""
