"""Everything needed to rebuild the small demo model and its LoRA adapters from nothing."""
