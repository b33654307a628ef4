"""`POST /v1/batches/plan`: what a create would find wrong with a file, and how the ready instances would run it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.auth import Caller
from service.api.batches import check_input, new_batch_of
from service.api.context import Context, context_of
from service.api.errors import ApiError, internal_error
from service.api.inputs import MAX_CREATE_BYTES, parse_object, read_body
from service.batchplan import ANSWER, QUESTION, BatchPlan, PlanQuestion, ReadyInstance
from service.errors import ModelMissing, StoreFailed
from service.planner_input import instance_view
from service.settings import child_environment
from service.store.batches import NewBatch
from service.store.instances import Boot, ready_boots
from service.store.tenants import Tenant

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/batches")

_LOOK_SECONDS = 0.5  # how soon a client that went away is noticed


@router.post("/plan")
async def plan_batch(request: Request, tenant: Caller) -> Response:
    """Refuses what a create refuses, except for the quota: nothing is queued. No connection is held while it plans."""
    context = context_of(request)
    raw = await read_body(request, MAX_CREATE_BYTES)
    new, question = await run_in_threadpool(_question, context, tenant, raw)
    with context.planning.taken(tenant.id, context.settings.plans_at_once):
        output = await _run(request, context, question)
    if output is None:
        return internal_error()
    answer = ANSWER.validate_json(output)
    if answer.plan is None:
        raise ModelMissing if answer.missing == ModelMissing.__name__ else StoreFailed
    return json_answer(plan_object(answer.plan, new, question))


def _question(context: Context, tenant: Tenant, raw: bytes) -> tuple[NewBatch, PlanQuestion]:
    settings = context.settings
    new = new_batch_of(parse_object(raw), settings)
    with context.database.transaction() as conn:
        file = check_input(conn, context, tenant, new.input_file_id)
        boots = ready_boots(conn, settings.stale_boot_seconds)
    return new, PlanQuestion(
        store_location=settings.store_location,
        store_path=file.store_path,
        endpoint=new.endpoint,
        model_policy=new.model_policy,
        max_lines=settings.max_lines,
        max_line_bytes=settings.max_line_bytes,
        default_output_tokens=settings.default_output_tokens,
        cohort_jobs=settings.cohort_jobs,
        models=tuple(context.models.by_name.values()),
        instances=tuple(_instance(boot) for boot in boots),
    )


def _instance(boot: Boot) -> ReadyInstance:
    view = instance_view(boot, None, 0.0)
    return ReadyInstance(
        name=boot.name,
        model=boot.model,
        engine=boot.engine,
        block_size=view.block_size,
        kv_capacity_tokens=view.kv_capacity_tokens,
        max_num_seqs=view.max_num_seqs,
        prefill_tokens_per_second=boot.prefill_tokens_per_second,
        decode_tokens_per_second=boot.decode_tokens_per_second,
    )


async def _run(request: Request, context: Context, question: PlanQuestion) -> bytes | None:
    """The answer of a process that plans; None where it failed. Raises ApiError when it takes too long, and
    ClientDisconnect; the process ends in any case."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "service.batchplan",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # a traceback's last line may quote a prompt
        env=child_environment(context.settings),
    )
    asked = asyncio.create_task(_ask(child, QUESTION.dump_json(question) + b"\n"))
    try:
        output = await _watched(request, asked, context.settings.plan_seconds)
        status = await child.wait()
    finally:
        asked.cancel()
        if child.returncode is None:
            child.kill()
            await child.wait()
    if status or not output:
        log.error("request_id=%s planning failed: exit status %d", request.state.request_id, status)
        return None
    return output


async def _ask(child: asyncio.subprocess.Process, question: bytes) -> bytes:
    """Standard input stays open: the child ends when it is closed."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(question)
        await child.stdin.drain()
    except ConnectionError:
        return b""  # it died at once; its exit status says so
    return await child.stdout.read()


async def _watched(request: Request, asked: asyncio.Task[bytes], limit_seconds: float) -> bytes:
    started = time.monotonic()
    while not (await asyncio.wait({asked}, timeout=_LOOK_SECONDS))[0]:
        if await request.is_disconnected():
            raise ClientDisconnect
        if time.monotonic() - started > limit_seconds:
            message = f"Planning this file takes longer than {limit_seconds:g} s: plan a part of it."
            raise ApiError(400, "plan_too_long", message, param="input_file_id")
    return asked.result()


def plan_object(plan: BatchPlan, new: NewBatch, question: PlanQuestion) -> dict[str, Any]:
    """Predictions are null where a model has no ready instance, and the time also where its rates are not known."""
    seconds = plan.estimated_seconds
    return {
        "object": "plan",
        "lines": plan.lines,
        "valid": plan.valid,
        "errors": {"object": "list", "data": plan.errors} if plan.errors else None,
        "models": plan.models,
        "prefix_groups": plan.prefix_groups,
        "prompt_tokens": plan.prompt_tokens,
        "shared_tokens": plan.shared_tokens,
        "bound": _share(plan.bound_tokens, plan),
        "predicted_hit_rate": _share(plan.predicted_cached_tokens, plan),
        "round_robin_hit_rate": _share(plan.round_robin_cached_tokens, plan),
        "estimated_seconds": seconds,
        "fits_window": None if seconds is None else seconds <= new.window_seconds,
        "instances": [
            {
                "name": instance.name,
                "model": instance.model,
                "engine": instance.engine,
                "block_size": instance.block_size,
                "kv_capacity_tokens": instance.kv_capacity_tokens,
            }
            for instance in question.instances
            if instance.model in plan.models
        ],
    }


def _share(tokens: int | None, plan: BatchPlan) -> float | None:
    return None if tokens is None or not plan.prompt_tokens else tokens / plan.prompt_tokens
