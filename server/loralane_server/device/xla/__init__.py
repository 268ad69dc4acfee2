"""The torch_xla backend: one finite set of compiled graphs behind the device seam."""
