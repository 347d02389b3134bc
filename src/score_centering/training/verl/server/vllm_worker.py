"""Part of vLLM's worker process under verl: takes the trainer's weights, requantises each once, loads those bytes."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from score_centering.rollout.vllm_capture import CaptureExtension
from score_centering.settings.inputs import read_json
from score_centering.training.verl.server.vllm_sync import Sync, flat_caches


class WorkerExtension(vLLMColocateWorkerExtension, CaptureExtension):
    """verl's extension with capture records, another weight sync, of any format: through vLLM's layerwise reload."""

    def monkey_patch_model(self, vocab_size: int) -> None:
        """Called once, when the engine is up: verl's, capture records, and a model runner whose caches can be woken.

        After a sleep vLLM zeroes a quantised cache's entries one by one and takes each for a tensor (0.25.0,
        `init_fp8_kv_scales`, which alone reads that list; vllm-project/vllm#41564); a layer of gated linear attention
        has a list of two.
        """
        super().monkey_patch_model(vocab_size)
        self.start_capture()
        self.model_runner.kv_caches[:] = flat_caches(self.model_runner.kv_caches)

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """All weights of one sync, as verl's sender passes them in buckets.

        vLLM processes a layer as soon as all its tensors are there and copies the result over the tensors in use, so
        captured graphs stay valid.

        Raises:
            ValueError: LoRA, or a parameter that is missing, unknown or there twice.
        """
        if peft_config is not None:
            raise ValueError("weight sync: LoRA adapters are not supported, whole weights are")
        model_config = self.model_runner.vllm_config.model_config
        model = self.model_runner.get_model()
        sync = Sync(AutoConfig.from_pretrained(model_config.model, local_files_only=True), _engine_config(model_config))
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        initialize_layerwise_reload(model)
        receiver.receive_weights(on_bucket_received=lambda weights: model.load_weights(sync.bucket(weights)))
        finalize_layerwise_reload(model, model_config)
        sync.finish()


def _engine_config(model_config: Any) -> dict:
    """config.json as vLLM uses it: the folder's, with the scheme that the server laid over it."""
    config = read_json(Path(model_config.model) / "config.json")
    scheme = model_config.hf_config.to_dict().get("quantization_config")
    return config if scheme is None else config | {"quantization_config": scheme}
