"""HTTP in front of the router: OpenAI, LoRAX/TGI and admin routes, each for its unmodified clients.

A request goes `app` → `bodies` (bytes to a checked record) → `completions`, `chat`, `native` or
`admin` → `generations` (open, read, close) → `sse` or one JSON answer. Errors of all routes are
rendered in `failures`.
"""
