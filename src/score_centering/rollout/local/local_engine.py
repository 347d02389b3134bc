"""The local rollout engine: continuous decoding with quantised linears and KV cache, on a CPU or one CUDA device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from score_centering.precision import listed_linears
from score_centering.precision.registry import cache_format_of
from score_centering.rollout.engine import Sampling, StreamEngine, sample_indices
from score_centering.rollout.local import sampling as choose
from score_centering.rollout.local.architecture import parameter_model, read_architecture, rotary_table
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.local.engine_weights import Weights
from score_centering.rollout.local.forward import Step, hidden_states
from score_centering.rollout.local.slots import Records, Slots
from score_centering.rollout.local.state import State
from score_centering.rollout.record import Rollout
from score_centering.rollout.streams import uniforms
from score_centering.settings import UserError

PREFILL_CHUNK = 64  # tokens of a prompt that are read at once
PREFILL_ROWS = {"cpu": 8, "cuda": 32}  # prompts that are read at once
# On a CPU, slots at the end that hold nothing and positions that no rollout has reached are left out in blocks of this
# many. That rows keep their bits rests on FP32 products that treat a row alike whatever their number of rows (MKL does
# from 4 rows on), and on sums whose order the zeros behind the last position don't change; a test holds it.
CPU_ROW_BLOCK = 16
CPU_POSITION_BLOCK = 16


class LocalEngine(StreamEngine):
    """Generates rollouts of a Llama or a Qwen3.5 text model; see `score_centering.rollout.Engine`.

    The prompt without its last token is read once for all its samples (prefill); each sample then occupies a slot,
    whose first decoding step feeds that last token. A slot whose rollout has finished takes the next waiting one.

    Args:
        config: the model's transformers config.
        quantised_config: the config.json of the quantised checkpoint, whose `quantization_config` lists the linears and
            says their number format; None computes everything in BF16.
        kv_cache: a name of `precision.registry.CACHES`; full-attention layers only.
        max_batch: slots, the rollouts decoded at the same time.
        max_prompt_length, max_response_length: tokens; they fix the shapes of everything.
        device: "cpu" or "cuda".
        check_every: on CUDA, decoding steps between two looks at which rollouts have finished.
        faults: damages the INT4 cache, in a study of faults.
        record_routes: keep which experts every token went through; for a mixture of experts only.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        quantised_config: Mapping[str, Any] | None,
        kv_cache: str,
        max_batch: int,
        max_prompt_length: int,
        max_response_length: int,
        device: str = "cpu",
        check_every: int = 16,
        faults: CacheFaults | None = None,
        record_routes: bool = False,
    ):
        architecture = read_architecture(config)
        cache = cache_format_of(kv_cache)
        cache.entry_size(architecture.head_size)
        if faults is not None and not cache.rotated:
            raise UserError(f"local engine: faults damage an INT4 cache, but kv_cache is {kv_cache!r}")
        if record_routes and architecture.experts is None:
            raise UserError(
                f"local engine: actor_rollout_ref.rollout.enable_rollout_routing_replay needs a mixture of experts, "
                f"model_type {config.model_type!r} has none"
            )
        self.device = torch.device(device)
        self.max_prompt_length = max_prompt_length
        self.max_response_length = max_response_length
        self.check_every = check_every
        meta_model = parameter_model(config)
        self.listed = {} if quantised_config is None else listed_linears(quantised_config, meta_model)
        self.architecture = architecture
        self.step: int | None = None
        self._faults = faults
        self._weights = Weights(architecture, meta_model, self.listed, self.device)
        self._chunk = min(PREFILL_CHUNK, max_prompt_length)
        prompt_positions = -(-max_prompt_length // self._chunk) * self._chunk
        positions = prompt_positions + max_response_length
        self._cos, self._sin = (table.unsqueeze(1) for table in rotary_table(config, positions, self.device))
        self._prompts = State.zeros(
            architecture, PREFILL_ROWS[self.device.type], prompt_positions, kv_cache, torch.float32, self.device
        )
        routes = (len(architecture.layer_kinds), architecture.experts.top_k) if record_routes else (0, 0)
        self._prompt_routes = torch.zeros(
            self._prompts.rows, prompt_positions, *routes, dtype=torch.int16, device=self.device
        )
        self._record_routes = record_routes
        self._state = State.zeros(architecture, max_batch, positions, kv_cache, torch.bfloat16, self.device)
        self._slots = Slots.empty(max_batch, self.device)
        self._slot_index = torch.arange(max_batch, device=self.device)
        self._position_index = torch.arange(positions, device=self.device)
        self._records: dict[int, Records] = {}  # by number of candidates
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by number of candidates, greedy

    def sync(self, weights: Mapping[str, Tensor], step: int) -> None:
        self._weights.fill(weights)
        self.step = step

    def close(self) -> None:
        self._graphs.clear()
        self._records.clear()
        del self._weights, self._state, self._prompts

    def nbytes(self) -> dict[str, int]:
        """Bytes the engine holds for weights and for the state of its slots, by what holds them."""
        return self._weights.nbytes() | self._state.nbytes()

    @torch.inference_mode()
    def generate_streams(
        self,
        prompts: Sequence[Sequence[int]],
        owner: np.ndarray,
        stream: np.ndarray,
        sampling: Sampling,
        top_logprobs: int,
    ) -> list[Rollout]:
        self._check_request(prompts, sampling, top_logprobs)
        total = len(owner)
        if self._faults is not None:
            self._faults.begin(self.step, int(np.bitwise_xor.reduce(stream).view(np.int64)), self.device)
        records = self._begin(stream, sampling, top_logprobs)
        started, group = 0, range(0)  # rollouts that have got a slot; prompts that have been read
        while True:
            active = self._slots.active.cpu().numpy()
            free = np.flatnonzero(~active)
            while started < total and len(free):
                prompt = int(owner[started])
                if prompt not in group:
                    group = range(prompt, min(prompt + self._prompts.rows, len(prompts)))
                    self._read([prompts[i] for i in group], group.start)
                stop = min(started + len(free), int(np.searchsorted(owner, group.stop)))
                self._admit(records, prompts, owner, range(started, stop), free[: stop - started], group.start)
                free, started = free[stop - started :], stop
            if started == total and len(free) == len(active):
                break
            self._advance(records, sampling.greedy)
        return self._collect(records, prompts, owner, sampling)

    def _check_request(self, prompts: Sequence[Sequence[int]], sampling: Sampling, top_logprobs: int) -> None:
        vocab = self.architecture.vocab_size
        if self.step is None:
            raise UserError("local engine: it has no weights yet, sync() comes before generate()")
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.max_prompt_length:
                raise UserError(
                    f"local engine: prompt {i} has {len(prompt)} tokens, allowed are 1 … {self.max_prompt_length}"
                )
            if min(prompt) < 0 or max(prompt) >= vocab:
                raise UserError(f"local engine: prompt {i} holds a token id outside 0 … {vocab - 1}")
        limits = {
            "max_tokens": (sampling.max_tokens, 1, self.max_response_length),
            "top_logprobs": (top_logprobs, 0, vocab),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise UserError(f"local engine: {name} is {value}, allowed are {low} … {high}")
        for token in sampling.stop_token_ids:
            if not 0 <= token < vocab:
                raise UserError(f"local engine: stop token {token}, allowed are 0 … {vocab - 1}")

    def _begin(self, stream: np.ndarray, sampling: Sampling, top_logprobs: int) -> Records:
        """Records for the rollouts, with their uniform numbers and the limits of this request."""
        total = len(stream)
        records = self._records.get(top_logprobs)
        if records is None or records.capacity < total:
            for key in [key for key in self._graphs if key[0] == top_logprobs]:
                del self._graphs[key]
            records = Records.empty(
                total,
                self.max_response_length,
                top_logprobs,
                self.architecture.vocab_size,
                (len(self._position_index), *self._prompt_routes.shape[2:]),
                self.device,
            )
            self._records[top_logprobs] = records
        numbers = torch.from_numpy(uniforms(stream, sampling.max_tokens))
        records.uniforms[:total, : sampling.max_tokens].copy_(numbers)
        records.temperature.fill_(sampling.temperature)
        records.limit.fill_(sampling.max_tokens)
        records.stop.zero_()
        records.stop[list(sampling.stop_token_ids)] = True
        self._slots.active.zero_()
        self._slots.record.fill_(records.capacity)
        return records

    def _read(self, prompts: Sequence[Sequence[int]], first: int) -> None:
        """Prefill: reads all but the last token of prompts `first`, first + 1, … into the rows of the prompt state."""
        state, chunk = self._prompts, self._chunk
        state.clear()
        lengths = [len(prompt) - 1 for prompt in prompts]
        chunks = -(-max(lengths) // chunk)
        tokens = np.zeros((state.rows, chunks * chunk), dtype=np.int64)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            tokens[row, :length] = prompt[:length]
        tokens = torch.from_numpy(tokens).to(self.device)
        read = torch.zeros(state.rows, 1, dtype=torch.int64)
        read[: len(lengths), 0] = torch.tensor(lengths)
        read = read.to(self.device)
        rows = torch.arange(state.rows, device=self.device)
        for start in range(0, chunks * chunk, chunk):
            part = slice(start, start + chunk)
            positions = self._position_index[part].expand(state.rows, -1)
            seen = self._position_index[: part.stop]
            step = Step(
                rows=rows,
                positions=positions,
                valid=positions < read,
                hidden=(seen > positions[0, :, None])[None, None],
                cos=self._cos[part],
                sin=self._sin[part],
                owner=None if self._faults is None else -1 - first - rows,
                faults=self._faults,
                routes=self._prompt_routes[:, part] if self._record_routes else None,
            )
            hidden_states(self.architecture, self._weights, state.up_to(part.stop), tokens[:, part], step)

    def _admit(
        self,
        records: Records,
        prompts: Sequence[Sequence[int]],
        owner: np.ndarray,
        rollouts: range,
        slots: np.ndarray,
        first_prompt: int,
    ) -> None:
        """Puts rollouts into empty slots; prompt `first_prompt` was read into row 0."""
        index = np.arange(rollouts.start, rollouts.stop)
        target = torch.from_numpy(slots).to(self.device)
        source = torch.from_numpy(owner[index] - first_prompt).to(self.device)
        self._state.copy_rows(target, self._prompts, source)
        records.routes[rollouts.start : rollouts.stop, : self._prompt_routes.shape[1]] = self._prompt_routes[source]
        last = [prompts[i][-1] for i in owner[index]]
        length = [len(prompts[i]) for i in owner[index]]
        self._slots.token[target] = torch.tensor(last, device=self.device)
        self._slots.position[target] = torch.tensor(length, device=self.device) - 1
        self._slots.count[target] = 0
        self._slots.record[target] = torch.from_numpy(index).to(self.device)
        self._slots.active[target] = True

    def _advance(self, records: Records, greedy: bool) -> None:
        """Decodes one step on a CPU, `check_every` steps on CUDA."""
        if self.device.type == "cpu":
            rows = self._compact(records.capacity)
            reached = int(self._slots.position[:rows].max()) // CPU_POSITION_BLOCK + 1  # blocks
            seen = min(reached * CPU_POSITION_BLOCK, len(self._position_index))
            self._decode(rows, seen, records, greedy)
            return
        graph = self._graphs.get((records.candidates, greedy)) or self._capture(records, greedy)
        for _ in range(self.check_every):
            graph.replay()

    def _compact(self, spare: int) -> int:
        """Moves rollouts to the front slots when that saves a block of rows; returns the rows that need computing."""
        active = self._slots.active.numpy()
        rows = min(-(-int(active.sum()) // CPU_ROW_BLOCK) * CPU_ROW_BLOCK, len(active))
        behind = np.flatnonzero(active[rows:]) + rows
        if len(behind):
            target = torch.from_numpy(np.flatnonzero(~active[:rows])[: len(behind)])
            source = torch.from_numpy(behind)
            self._state.copy_rows(target, self._state, source)
            self._slots.move(target, source, spare)
        return rows

    def _capture(self, records: Records, greedy: bool) -> torch.cuda.CUDAGraph:
        """The CUDA graph of one decoding step. It is warmed up and captured with every slot made inactive."""
        saved = [tensor.clone() for tensor in self._slots.tensors()]
        saved_state = [tensor.clone() for layer in self._state.layers for tensor in layer.tensors()]
        self._slots.active.zero_()
        self._slots.record.fill_(records.capacity)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._decode(self._slots.token.shape[0], len(self._position_index), records, greedy)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode(self._slots.token.shape[0], len(self._position_index), records, greedy)
        for tensor, value in zip(self._slots.tensors(), saved, strict=True):
            tensor.copy_(value)
        for tensor, value in zip(
            (tensor for layer in self._state.layers for tensor in layer.tensors()), saved_state, strict=True
        ):
            tensor.copy_(value)
        self._graphs[records.candidates, greedy] = graph
        return graph

    def _decode(self, rows: int, seen: int, records: Records, greedy: bool) -> None:
        """One token for each of the first `rows` slots, none at position `seen` or after it; never waits for the
        device."""
        slots, state = self._slots.first_rows(rows), self._state.first_rows(rows).up_to(seen)
        routes = records.routes.new_empty(rows, 1, *records.routes.shape[2:]) if self._record_routes else None
        step = Step(
            rows=self._slot_index[:rows],
            positions=slots.position[:, None],
            valid=None,
            hidden=(self._position_index[:seen] > slots.position[:, None])[:, None, None],
            cos=self._cos[slots.position, None],
            sin=self._sin[slots.position, None],
            owner=slots.record,
            faults=self._faults,
            routes=routes,
        )
        hidden = hidden_states(self.architecture, self._weights, state, slots.token[:, None], step)
        if routes is not None:
            records.routes[slots.record, slots.position] = routes.squeeze(1)
        logprobs = choose.log_probabilities(self._weights.lm_head(hidden), records.temperature)
        if greedy:
            token = logprobs.argmax(dim=-1)
        else:
            token = choose.draw(logprobs, records.uniforms[slots.record, slots.count])
        where = (slots.record, slots.count)
        records.tokens[where] = token.to(torch.int32)
        records.logprobs[where] = logprobs.gather(1, token[:, None]).squeeze(1)
        if records.candidates:
            values, ids = choose.head(logprobs, records.candidates)
            records.candidate_ids[where] = ids.to(torch.int32)
            records.candidate_logprobs[where] = values
        count = slots.count + 1
        records.lengths[slots.record] = count
        going_on = slots.active & (count < records.limit) & ~records.stop[token]
        slots.token.copy_(token)
        slots.position.add_(going_on)
        slots.count.copy_(torch.where(going_on, count, 0))
        slots.record.masked_fill_(~going_on, records.capacity)
        slots.active.copy_(going_on)

    def _collect(
        self, records: Records, prompts: Sequence[Sequence[int]], owner: np.ndarray, sampling: Sampling
    ) -> list[Rollout]:
        """Fetches the records of all rollouts, once, and cuts them to their lengths."""
        total = len(owner)
        lengths, tokens, logprobs, ids, head, routes = (
            tensor[:total].to("cpu", copy=True).numpy()
            for tensor in (
                records.lengths,
                records.tokens,
                records.logprobs,
                records.candidate_ids,
                choose.round_to_grid(records.candidate_logprobs[:total]),
                records.routes,
            )
        )
        if self._record_routes:
            routes = routes.astype(np.uint8 if self.architecture.experts.count <= 256 else np.uint16)
        rollouts = []
        samples = sample_indices(owner)
        for index in range(total):
            i, j = int(owner[index]), int(samples[index])
            length = lengths[index]
            if not np.isfinite(logprobs[index, :length]).all():
                self._state.clear()
                raise UserError(
                    f"local engine: rollout (prompt {i}, sample {j}) has a log-prob that is not finite "
                    f"(weights of step {self.step})"
                )
            rollouts.append(
                Rollout(
                    prompt_index=i,
                    sample_index=j,
                    prompt_ids=np.asarray(prompts[i], dtype=np.int32),
                    token_ids=tokens[index, :length],
                    logprobs=logprobs[index, :length],
                    candidate_ids=ids[index, :length] if records.candidates else None,
                    candidate_logprobs=head[index, :length] if records.candidates else None,
                    finish_reason="stop" if tokens[index, length - 1] in sampling.stop_token_ids else "length",
                    routes=routes[index, : len(prompts[i]) + length - 1] if self._record_routes else None,
                )
            )
        return rollouts
