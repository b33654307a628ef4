"""Trunkline for producers: submit batches and single jobs to a Trunkline server, and read what came of them."""

from trunkline.async_client import AsyncClient
from trunkline.client import Client
from trunkline.errors import (
    APIError,
    AuthenticationError,
    BatchFailed,
    ConfigError,
    ConflictError,
    ConnectionFailed,
    InputError,
    InvalidRequestError,
    JobFailed,
    NotFoundError,
    PermissionDenied,
    QuotaError,
    ServerError,
    TimedOut,
    TrunklineError,
    UnreadableReply,
)
from trunkline.wire import Batch, BatchUsage, Error, File, Job, LineError, Model, Page, Result, Usage
from trunkline.wire_lines import BatchLine
from trunkline.wire_reports import Plan, Report

__all__ = [
    "APIError",
    "AsyncClient",
    "AuthenticationError",
    "Batch",
    "BatchFailed",
    "BatchLine",
    "BatchUsage",
    "Client",
    "ConfigError",
    "ConflictError",
    "ConnectionFailed",
    "Error",
    "File",
    "InputError",
    "InvalidRequestError",
    "Job",
    "JobFailed",
    "LineError",
    "Model",
    "NotFoundError",
    "Page",
    "PermissionDenied",
    "Plan",
    "QuotaError",
    "Report",
    "Result",
    "ServerError",
    "TimedOut",
    "TrunklineError",
    "UnreadableReply",
    "Usage",
]
