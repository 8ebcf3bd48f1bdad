"""Pipeline parallelism: each rank of a group holds some of the model's layers."""
