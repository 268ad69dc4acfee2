"""An adapter's way from a reference to lanes on the device, one stage a file."""
