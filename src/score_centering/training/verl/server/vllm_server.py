"""vLLM as a rollout server of verl with what verl 0.8.0 lacks: number formats, and the capture records of `messages`.

No file of either package changes: the server and the replica are subclasses, entered into verl's registry.
"""

import json
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from score_centering.precision.names import multimodal_config, needs_multimodal_class
from score_centering.rollout.make_engine import check_kernel, read_quantised_config
from score_centering.rollout.vllm import check_prompts, linear_head_size, sampling_parameters, to_rollout
from score_centering.settings.inputs import read_json
from score_centering.training.verl.messages import RECORD
from score_centering.training.verl.server.vllm_sync import engine_arguments, engine_overrides, set_switches

NO_PORT = 0
WORKER = "score_centering.training.verl.server.vllm_worker.WorkerExtension"


class VllmServer(vLLMHttpServer):
    """verl's server; weights come through `vllm_worker`, requests and answers are those of `messages`."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        """Where vLLM knows the text model inside its multimodal class only, it opens a folder that says so."""
        super()._post_init(cuda_visible_devices)
        folder = Path(self.model_config.local_path)
        config = read_json(folder / "config.json")
        if needs_multimodal_class(config):
            config = multimodal_config(config)
            self._view = tempfile.TemporaryDirectory(prefix="vllm-model-")
            view = Path(self._view.name)
            for file in folder.iterdir():
                if file.suffix in (".json", ".jinja", ".txt", ".model"):
                    shutil.copyfile(file, view / file.name)
            (view / "config.json").write_text(json.dumps(config), encoding="utf-8")
            self.model_config.local_path = str(view)
        self._engine_config = config

    def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
        for name, value in engine_arguments(self._engine_config["architectures"][0]).items():
            engine_kwargs.setdefault(name, value)

    def _apply_quantization(self) -> tuple[str | None, dict[str, Any]]:
        """A number format of our own and `quantization_config_file`, which verl 0.8.0 refuses."""
        if self.config.quantization is None:
            return None, {}
        path = Path(self.config.quantization_config_file)
        quantised = read_quantised_config(self.config.quantization, path)
        check_kernel(self.config.quantization, "cuda", linear_head_size(quantised) is not None)
        if needs_multimodal_class(quantised):
            quantised = multimodal_config(quantised)
        return engine_overrides(quantised)

    def _get_worker_extension_cls(self) -> str:
        return WORKER

    async def run_server(self, args: Namespace) -> None:
        """verl's, without its HTTP application: agent loops call the actor, nothing listens on a port."""
        set_switches(args, self.config)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config(usage_context=UsageContext.LLM_CLASS)
        config.parallel_config.data_parallel_master_port = self._dp_master_port
        self.engine = AsyncLLM.from_vllm_config(
            config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=engine_args.disable_log_stats
        )
        vocabulary = len(self.model_config.tokenizer)
        await self.engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocabulary})
        self._server_port = NO_PORT

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """One rollout with its capture record; a request without candidates asks for sampled log-probs only."""
        check_prompts([prompt_ids], self._engine_config)
        candidates = sampling_params["top_logprobs"]
        parameters = sampling_parameters(sampling_params["sampling"], sampling_params["seed"], candidates, request_id)
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        final = None
        try:
            async for output in self.engine.generate(
                prompt=TokensPrompt(prompt_token_ids=list(prompt_ids)),
                sampling_params=parameters,
                request_id=request_id,
            ):
                final = output
        except BaseException:  # abandoned, by its caller too: the worker would keep its record for ever
            await self.engine.collective_rpc("drop_capture", args=([request_id],))
            raise
        ((record,), *_) = await self.engine.collective_rpc("take_capture", args=([request_id],))
        rollout = to_rollout(0, 0, prompt_ids, final.outputs[0], record, candidates)
        return TokenOutput(
            token_ids=rollout.token_ids.tolist(), stop_reason="completed", extra_fields={RECORD: rollout}
        )


class VllmReplica(vLLMReplica):
    """Launches `VllmServer` actors."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.server_class = ray.remote(VllmServer)
