"""The HTTP surfaces: OpenAI, LoRAX/TGI native, administration."""
