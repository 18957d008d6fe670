"""What stands in for an NPU where there is none."""
