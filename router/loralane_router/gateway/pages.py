"""`?limit=` and `?after=` of the routes that list."""

from starlette.requests import Request

from loralane_router.errors import invalid
from loralane_router.gateway import fields


def page_of(request: Request, default: int, most: int) -> tuple[int, str]:
    """Return (how many, behind which name). Raises RequestError (400)."""
    given = request.query_params.get("limit")
    limit = default
    if given is not None:
        if not given.isascii() or not given.isdecimal() or len(given) > len(str(most)):
            raise invalid(f"limit must be a number between 1 and {most}", "limit")
        limit = fields.whole("limit", int(given), 1, most)
    return limit, fields.name("after", request.query_params.get("after", ""))
