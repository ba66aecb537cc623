"""What trains one model: its worker, optimizer, loss and metrics of an update, its checkpoints."""
