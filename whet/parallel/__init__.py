"""The processes that train together, where a model's tensors lie, and sharding by FSDP."""
