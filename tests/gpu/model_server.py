"""A real vLLM or SGLang server for measurements: its start, and the few calls that they need."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rlstreams.workers.weights import payloads, server_plugin

UP_S = 420.0  # on a busy machine; steps have limits of their own
LONG_TOKENS = 600


class ModelServer:
    """One server process; use it as a context."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        port: int,
        gpu: str,
        python: str,
        arguments: list[str],
        ranks: int = 1,
    ) -> None:
        self._port = port
        self.ranks = ranks
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{type(self).__name__}-{port}.log"
        environment = (
            os.environ | server_plugin.environment(folder / "plugin") | {"HF_HUB_OFFLINE": "1"}
        )
        if gpu:
            environment |= {"CUDA_VISIBLE_DEVICES": gpu}
        command = [python, *self.command(model, port), *arguments]
        self._process = subprocess.Popen(
            command,
            env=environment | self.environment(),
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def command(self, model: Path, port: int) -> list[str]:
        """Arguments after the interpreter."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Beside the plugin's. Lent machines allow no NVLink multicast: sums go by plain NCCL."""
        return {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

    def __enter__(self) -> ModelServer:
        started_s = time.monotonic()
        while time.monotonic() < started_s + UP_S:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server died: {self.tail()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
        else:
            self.__exit__()
            raise RuntimeError(f"the server is not up after {UP_S:g} s: {self.tail()}")
        self.up_s = time.monotonic() - started_s
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def tail(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-3000:]

    def post(self, path: str, body: object = None, timeout_s: float = 120.0) -> Any:
        """The answer's JSON, or its text.

        Raises:
            RuntimeError: not 200.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps({} if body is None else body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as err:
            raise RuntimeError(f"{path}: {err.code} {err.read()[:1000]!r}; {self.tail()}") from err
        try:
            return json.loads(text)
        except ValueError:
            return text


class Vllm(ModelServer):
    """vLLM 0.25.1; 0.32.0 on a CPU with `--enable-scale-out` among the arguments."""

    def command(self, model: Path, port: int) -> list[str]:
        """Development routes, our plugin, dummy weights."""
        transfer = json.dumps({"backend": "rlstreams"})
        command = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(model), "--load-format", "dummy"]
        command += ["--skip-tokenizer-init", "--weight-transfer-config", transfer]
        command += ["--tensor-parallel-size", str(self.ranks)]
        command += ["--disable-custom-all-reduce"] if self.ranks > 1 else []
        return [*command, "--max-model-len", "4096", "--max-num-seqs", "8"]

    def environment(self) -> dict[str, str]:
        """Routes for updates; no sampler that is compiled at the first request."""
        updates = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        return updates | {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"} | super().environment()

    def prepare(self) -> None:
        """Once after the start."""
        self.post("/init_weight_transfer_engine", payloads.VLLM_INIT)

    def pause(self) -> None:
        """Running requests stay."""
        self.post("/pause?mode=keep&clear_cache=true")

    def update(self, text: str) -> None:
        """Carry an order."""
        self.post("/start_weight_update", payloads.VLLM_START)
        self.post("/update_weights", payloads.vllm_update(text))
        self.post("/finish_weight_update", payloads.VLLM_FINISH)

    def resume(self) -> None:
        """Go on."""
        self.post("/resume")

    def logprobs(self, ids: list[int]) -> list[float]:
        """Of the prompt's tokens from the second."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        body = {"token_ids": ids, "sampling_params": sampling}
        rows = self.post("/inference/v1/generate", body)["prompt_logprobs"][1:]
        return [next(iter(row.values()))["logprob"] for row in rows]

    def long_request(self) -> tuple[int, str]:
        """Tokens and finish reason of a request that lasts for seconds."""
        sampling = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 1.0}
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        choice = self.post("/inference/v1/generate", body)["choices"][0]
        return len(choice["token_ids"]), choice["finish_reason"]


class Sglang(ModelServer):
    """SGLang 0.5.17."""

    def command(self, model: Path, port: int) -> list[str]:
        """The Triton backend: the packed server is without FlashAttention."""
        command = ["-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"]
        command += ["--custom-weight-loader", payloads.SGLANG_LOADER, "--grammar-backend", "none"]
        command += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
        command += ["--tp-size", str(self.ranks)]
        if self.ranks > 1:
            command += ["--disable-custom-all-reduce"]
            command += ["--enforce-disable-flashinfer-allreduce-fusion"]
        return [*command, "--context-length", "4096", "--max-running-requests", "8"]

    def environment(self) -> dict[str, str]:
        """`/health` answers without generating."""
        return {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"} | super().environment()

    def prepare(self) -> None:
        """Nothing."""

    def pause(self) -> None:
        """Running requests stay."""
        self.post("/pause_generation", {"mode": "in_place"})

    def update(self, text: str) -> None:
        """Carry an order."""
        self.post("/update_weights_from_tensor", payloads.sglang_update(text, self.ranks))

    def resume(self) -> None:
        """Go on; stale prefixes go."""
        self.post("/continue_generation")

    def logprobs(self, ids: list[int]) -> list[float]:
        """Of the prompt's tokens from the second."""
        self.post("/flush_cache")
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": ids, "sampling_params": sampling}
        body |= {"return_logprob": True, "logprob_start_len": 0}
        rows = self.post("/generate", body)["meta_info"]["input_token_logprobs"][1:]
        return [row[0] for row in rows]

    def long_request(self) -> tuple[int, str]:
        """Tokens and finish reason of a request that lasts for seconds."""
        sampling = {"max_new_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 1.0}
        answer = self.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})
        return len(answer["output_ids"]), answer["meta_info"]["finish_reason"]["type"]


SERVERS: dict[str, type[Vllm | Sglang]] = {"vllm": Vllm, "sglang": Sglang}
PYTHON = sys.executable
