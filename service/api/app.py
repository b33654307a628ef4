"""The ASGI application: routers, errors, and what they work with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from service.api import (
    batch_actions,
    batches,
    errors,
    files,
    health,
    jobs,
    metrics,
    models,
    plan,
    report,
    requests,
    results,
    transparent,
)
from service.api.auth import check_reachable_with_key
from service.api.context import Context
from service.api.hub import RelayHub
from service.api.openapi import document
from service.api.scope import RequestScope
from service.api.waiting import JobWaiter
from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.connections import Connections, find_connections
from service.fleet import Models, load_models
from service.logs import set_up_logging
from service.migrate import check_schema
from service.settings import Settings, read_settings
from service.store.blobs import Blobs
from service.store.session import Database
from service.tokenizing import Tokenizing

# Each has a `router`. The order matters: /v1/batches/plan goes before /v1/batches/{batch_id}.
PARTS = (
    files,
    plan,
    batches,
    batch_actions,
    requests,
    report,
    results,
    jobs,
    transparent,
    models,
    health,
    metrics,
    document,
)


def create_app(
    settings: Settings,
    connections: Connections,
    models_: Models,
    database: Database,
    publisher: Publisher,
    blobs: Blobs,
) -> FastAPI:
    """The application over what it is given; nothing is opened before it starts."""
    waiter = JobWaiter(database)
    relay = RelayHub(connections.broker_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        waiter.start()
        relay.start()
        yield
        await relay.stop()
        await waiter.stop()

    # No generated document: it would know nothing of the codes; `service.api.openapi` is written by hand.
    app = FastAPI(lifespan=lifespan, redirect_slashes=False, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = Context(
        settings=settings,
        models=models_,
        database=database,
        publisher=publisher,
        blobs=blobs,
        tokenizing=Tokenizing(models_, default_output_tokens=settings.default_output_tokens),
        waiter=waiter,
        relay=relay,
    )
    app.state.metrics = metrics.Metrics()
    errors.install(app)
    app.add_middleware(RequestScope)
    for part in PARTS:
        app.include_router(part.router)
    return app


def build(settings: Settings) -> FastAPI:
    """Check what start-up needs, each failure one sentence (a TrunklineError), and make the application."""
    connections = find_connections(settings)
    database = Database(connections.database_url, application_name="trunkline-api")
    database.check()
    check_schema(database)
    check_reachable_with_key(settings, database)
    served = load_models(settings.models_path)
    blobs = Blobs(settings.store_location)
    publisher = Publisher(make_app(settings, connections.broker_url, queue=CONTROL_QUEUE))
    return create_app(settings, connections, served, database, publisher, blobs)


def app_from_environment() -> FastAPI:
    """For `uvicorn --factory service.api.app:app_from_environment`."""
    settings = read_settings()
    set_up_logging(settings)
    return build(settings)
