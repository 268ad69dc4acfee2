"""The ASGI application: all routes of one router."""

from starlette.applications import Starlette
from starlette.types import ASGIApp

from loralane_router.gateway import admin, chat, completions, health, models, native
from loralane_router.gateway.access import Access
from loralane_router.gateway.direct import Direct
from loralane_router.gateway.failures import HANDLERS
from loralane_router.gateway.limits import Limits
from loralane_router.router import Router


def create_app(router: Router, limits: Limits | None = None) -> ASGIApp:
    """Return the application; the router is started and closed by whoever made it."""
    limits = limits or Limits()
    text = [
        *completions.routes(router, limits),
        *chat.routes(router, limits),
        *native.routes(router, limits),
    ]
    app = Starlette(
        routes=[
            *text,
            *models.routes(router),
            *admin.routes(router, limits),
            *health.routes(router),
        ],
        exception_handlers=HANDLERS,
    )
    return Access(Direct(app, text), router.metrics.requests)
