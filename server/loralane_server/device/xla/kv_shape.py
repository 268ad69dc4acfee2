"""How much memory a layer's KV pages take: what attention allocates is what settings count. Pure.

plain    [pages, kv_heads, 2, page_tokens, head_dim]
kernel   [pages, page_tokens, 2 * kv_heads, padded head_dim]
"""

from typing import Final

from loralane_server.kv.pages import PAGE_TOKENS

#: The kernel wants heads in whole registers.
_HEAD_LANES: Final = 128


def kv_shape(pages: int, kv_heads: int, head_dim: int, *, kernel: bool) -> tuple[int, ...]:
    """Return the shape of a layer's pages; `kernel`: as a TPU's attention kernel wants them."""
    if not kernel:
        return pages, kv_heads, 2, PAGE_TOKENS, head_dim
    padded = -(-head_dim // _HEAD_LANES) * _HEAD_LANES
    return pages, PAGE_TOKENS, 2 * kv_heads, padded
