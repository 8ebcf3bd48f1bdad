"""Plan a training run without a GPU: memory per rank, layouts that fit, estimated step time, services."""
