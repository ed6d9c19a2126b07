"""A vLLM engine on the CPU in a process of its own: a model of two layers with weights from a seed, no tokenizer.

`Engine` starts one and talks to it, an object of JSON a line. As a program: `engine.py MODEL_FOLDER TRANSFER OPTIONS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

BLOCK_TOKENS = 32
NEW_TOKENS = 12
HERE = Path(__file__).resolve().parent
CONFIGURATIONS = {kind: (HERE / f"configuration.{kind}.json").read_text() for kind in ("tier", "connector")}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the program sees the engine's insides
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def prompt(number: int, tokens: int = 330) -> list[int]:
    return [(7 * at + 13 * number) % 500 + 3 for at in range(tokens)]


def tier(url: str) -> dict[str, Any]:
    """The configuration of the tier, with this target, little memory, and the CPU's copies."""
    config: dict[str, Any] = json.loads(CONFIGURATIONS["tier"].replace("kbtp://cache-server", url))
    config["kv_connector_extra_config"].update(
        spec_name="MemcpySpec", spec_module_path="memcpy_spec", cpu_bytes_to_use=1 << 20
    )
    return config


def connector(url: str, role: str = "kv_both", **options: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(CONFIGURATIONS["connector"].replace("kbtp://cache-server", url))
    config["kv_role"] = role
    config["kv_connector_extra_config"].update(options)
    return config


class Engine:
    """The other side of the pipe."""

    def __init__(self, folder: Path, transfer: dict[str, Any], **options: Any) -> None:
        """`options` are vLLM's."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODEL))
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__), folder, json.dumps(transfer), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self._ready = False

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Raises `EOFError` if the engine has died."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """The same in two parts: something may happen before its `answer`."""
        assert self._process.stdin is not None
        if not self._ready:
            self._ready = bool(self.answer())
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM says more
                return json.loads(line)
        raise EOFError(f"the engine has ended: {self._process.wait()}")

    def generate(self, *numbers: int, **arguments: Any) -> list[list[int]]:
        told = self("generate", prompts=[prompt(one) for one in numbers], **arguments)
        tokens: list[list[int]] = told["tokens"]
        return tokens

    def counters(self) -> dict[str, Any]:
        """Of the cache, and `troubles`."""
        counters: dict[str, Any] = self("counters")
        return counters

    def close(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
        return self._process.returncode


class Served:
    """In the process of the engine."""

    def __init__(self, model: str, transfer: dict[str, Any], options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._parameters = SamplingParams
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_num_seqs=4,
            enable_prefix_caching=True,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**transfer),
            seed=0,
            **{"max_model_len": 1024, **options},
        )
        self._core = self._llm.llm_engine.engine_core.engine_core

    def generate(
        self, prompts: list[list[int]], parameters: dict[str, Any] | None = None, new_tokens: int = NEW_TOKENS
    ) -> dict[str, Any]:
        sampling = self._parameters(
            max_tokens=new_tokens,
            temperature=0,
            detokenize=False,
            extra_args={"kv_transfer_params": parameters} if parameters else None,
        )
        outputs = self._llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in outputs],
            "parameters": [one.kv_transfer_params for one in outputs],
        }

    def step(self) -> dict[str, Any]:
        """What is on its way goes on."""
        self._llm.llm_engine.step()
        return {}

    def forget(self) -> dict[str, Any]:
        """The engine's own prefix cache, and what its connector has in memory."""
        forgotten = self._llm.reset_prefix_cache(reset_connector=True)
        return {"forgotten": forgotten}

    def counters(self) -> dict[str, Any]:
        connector = self._core.scheduler.connector
        if hasattr(connector, "connector_scheduler"):
            [one] = connector.connector_scheduler.manager.secondary_tiers
            return {**one.cache.counters.as_dict(), "troubles": one.troubles.as_dict()}
        worker = get_kv_transfer_group()
        troubles = {"scheduler": connector.troubles.as_dict(), "worker": worker.troubles.as_dict()}
        return {**worker.cache.counters.as_dict(), "troubles": {k: v for k, v in troubles.items() if v}}

    def blocks(self) -> dict[str, Any]:
        """Of all blocks in the engine's prefix cache, by the hash of their tokens: what their octets begin with, and a
        digest of all of them."""
        layers = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        found = {}
        for block in self._core.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                octets = b"".join(layer[block.block_id].view(torch.uint8).numpy().tobytes() for layer in layers)
                found[bytes(block.block_hash).hex()] = [octets[:64].hex(), hashlib.sha256(octets).hexdigest()]
        return found

    def close(self) -> None:
        self._core.shutdown()


def main(model: str, transfer: str, options: str) -> None:
    served = Served(model, json.loads(transfer), json.loads(options))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        print(json.dumps(getattr(served, arguments.pop("do"))(**arguments)), flush=True)
    served.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
