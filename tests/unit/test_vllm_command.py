"""What vLLM is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import ModelMissing, SettingError
from service.fleet import Instance, Model
from workers.engines.http import cache_config, count_prompts, tokenize_question
from workers.engines.vllm_command import argument_value, build_command, cause_in_log, max_num_seqs


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def instance(*arguments: str, **values: object) -> Instance:
    return Instance(**{"name": "one", "engine": "vllm", "model": "tiny", "arguments": arguments, **values})  # type: ignore[arg-type]


def command(instance: Instance, model: Model, *, is_cpu: bool = False) -> tuple[list[str], dict[str, str]]:
    return build_command(instance, model, port=1234, is_cpu=is_cpu, environment={"PATH": "/bin"})


def value_of(argv: list[str], name: str) -> str | None:
    return argument_value(tuple(argv), name)


def test_the_server_listens_on_loopback_under_every_name_of_its_model(weights: Path) -> None:
    argv, environment = command(instance(), Model(name="tiny", tokenizer=weights, aliases=("small", "t")))
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert value_of(argv, "--model") == str(weights)
    assert (value_of(argv, "--host"), value_of(argv, "--port")) == ("127.0.0.1", "1234")
    at = argv.index("--served-model-name")
    assert argv[at + 1 : at + 5] == ["tiny", "small", "t", "--host"]
    assert "--enable-prompt-tokens-details" in argv
    assert value_of(argv, "--scheduling-policy") == "priority"
    assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PATH"] == "/bin"


def test_devices_become_visible_gpus_and_tensor_parallelism(weights: Path) -> None:
    model = Model(name="tiny", tokenizer=weights)
    argv, environment = command(instance(devices=(2, 3)), model)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert value_of(argv, "--tensor-parallel-size") == "2"
    argv, environment = command(instance(devices=(1,)), model)
    assert (environment["CUDA_VISIBLE_DEVICES"], value_of(argv, "--tensor-parallel-size")) == ("1", None)
    argv, environment = command(instance(), model)
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert value_of(argv, "--block-size") is None


def test_a_cpu_gets_small_blocks_and_bounded_memory(weights: Path) -> None:
    model = Model(name="tiny", tokenizer=weights)
    argv, environment = command(instance(), model, is_cpu=True)
    assert (value_of(argv, "--block-size"), value_of(argv, "--max-num-seqs")) == ("32", "16")
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_what_the_instance_gives_wins(weights: Path) -> None:
    model = Model(name="tiny", tokenizer=weights)
    given = instance(
        *("--block-size=64", "--max_num_seqs", "8", "--tensor-parallel-size", "1", "--enforce-eager"),
        devices=(0, 1),
        environment=(("VLLM_CPU_OMP_THREADS_BIND", "1"), ("VLLM_CPU_KVCACHE_SPACE", "4")),
    )
    argv, environment = command(given, model, is_cpu=True)
    assert [item for item in argv if item.startswith("--block-size")] == ["--block-size=64"]
    assert "--max-num-seqs" not in argv
    assert argv.count("--tensor-parallel-size") == 1
    assert argv[-1] == "--enforce-eager"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert max_num_seqs(given, is_cpu=True) == 8


def test_a_name_on_a_hub_is_not_offline_and_takes_the_revision() -> None:
    model = Model(name="tiny", revision="abc")
    argv, environment = command(instance(weights="owner/tiny"), model)
    assert (value_of(argv, "--model"), value_of(argv, "--revision")) == ("owner/tiny", "abc")
    assert "HF_HUB_OFFLINE" not in environment


@pytest.mark.parametrize("argument", ["--port=1", "--served-model-name", "--api-key", "--enable_log_requests"])
def test_arguments_that_are_ours_are_refused(weights: Path, argument: str) -> None:
    with pytest.raises(SettingError, match=r"\[instances\.one\] arguments: --"):
        command(instance(argument, "x"), Model(name="tiny", tokenizer=weights))


def test_what_is_missing_is_named(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(ModelMissing, match="is no folder"):
        command(instance(weights=str(tmp_path / "nowhere")), Model(name="tiny"))
    with pytest.raises(ModelMissing, match=r"holds no config\.json"):
        command(instance(weights=str(tmp_path)), Model(name="tiny"))
    with pytest.raises(SettingError, match="weights"):
        command(instance(), Model(name="tiny"))
    with pytest.raises(SettingError, match="--lora-modules NAME=FOLDER for polite"):
        command(instance(), Model(name="tiny", tokenizer=weights, adapters=("polite",)))
    with pytest.raises(SettingError, match="--max-num-seqs many"):
        command(instance("--max-num-seqs", "many"), Model(name="tiny", tokenizer=weights))


def test_the_cause_in_a_log_is_the_root_and_not_its_echo() -> None:
    log = (
        "(APIServer pid=1) INFO 11-29 13:09:55 [api_utils.py:286] non-default args: {}\n"
        "(EngineCore pid=2) ERROR 11-29 13:09:56 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=2) ERROR 11-29 13:09:56 [core.py:1] ValueError: No available memory for the cache blocks.\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n"
    )
    assert cause_in_log(log) == "ValueError: No available memory for the cache blocks."
    usage = "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --nonsense\n"
    assert cause_in_log(usage) == "api_server.py: error: unrecognized arguments: --nonsense"
    assert cause_in_log("first\nKilled\n") == "Killed"
    assert cause_in_log("") is None


def test_the_cache_is_read_from_the_metrics() -> None:
    text = (
        b"# TYPE vllm:cache_config_info gauge\n"
        b'vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="4096",num_gpu_blocks="128"} 1.0\n'
    )
    assert cache_config(text) == (4096, 32)
    assert cache_config(text.replace(b'kv_cache_size_tokens="4096"', b'kv_cache_size_tokens="None"')) == (4096, 32)
    assert cache_config(b"python_info 1.0\n") == (None, None)


def test_several_prompts_are_counted() -> None:
    assert count_prompts("/v1/chat/completions", b"{}") == 1
    assert count_prompts("/v1/completions", b'{"prompt": ["a", "b"]}') == 2
    assert count_prompts("/v1/completions", b'{"prompt": [1, 2, 3]}') == 1
    assert count_prompts("/v1/embeddings", b'{"input": [[1, 2], [3]]}') == 2


def test_tokenize_is_asked_what_the_endpoint_would_render() -> None:
    body = {"model": "m", "messages": [], "tools": [1], "max_tokens": 3, "chat_template_kwargs": {"a": 1}}
    asked = tokenize_question("/v1/chat/completions", body)
    assert asked == {"model": "m", "messages": [], "tools": [1], "chat_template_kwargs": {"a": 1}}
    assert tokenize_question("/v1/completions", {"model": "m", "prompt": "x"}) == {"model": "m", "prompt": "x"}
    assert tokenize_question("/v1/completions", {"model": "m", "prompt": [1, 2]}) is None
