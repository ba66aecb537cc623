"""What every part may use: names resolved, memory and devices, output that never fails, model folders."""
