"""A process that owns a vLLM, for a test to kill: `python hold_engine.py STATE MODEL_FOLDER ARGUMENT...`.

Prints one line of JSON once the engine has answered, then waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from service.fleet import Instance, Model
from service.settings import Settings
from workers.engines.vllm import VllmEngine


async def main(state: Path, model_folder: Path, arguments: tuple[str, ...]) -> None:
    model = Model(name="smollm2", tokenizer=model_folder)
    instance = Instance(name="one", engine="vllm", model=model.name, arguments=arguments)
    engine = VllmEngine(instance, model, Settings(state_folder=state, engine_start_seconds=900))
    facts = await engine.start()
    sys.stdout.write(json.dumps({"keeper": facts.pid, "kv_capacity_tokens": facts.kv_capacity_tokens}) + "\n")
    sys.stdout.flush()
    sys.stdout.write(await engine.wait_dead())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:])))
