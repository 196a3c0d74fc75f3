"""A small vocoder in torch with the class and method names of vLLM-Omni's Code2Wav stage.

`python code2wav_standin.py FOLDER`: a worker that decodes chunks for ever. FOLDER/worker.order names a
step, as this file's methods call it; the next time that step runs, it waits until FOLDER/release exists. While FOLDER/drag exists every step takes DRAG_S.
The tensors are small and real; nothing of the original is in here but names and the order of calls.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import ModuleType

from stallwatch import heartbeat

if __name__ == "__main__":
    # Importing torch takes a second: who attaches late is taken for an engine without heartbeats.
    BOARD = heartbeat.attach(role="worker", rank=0)
    BOARD.lane("setup").enter("import", cls="start")

import torch
from torch import nn

BASE = "vllm_omni.model_executor.models.minicpmo_4_5"
CHANNELS, CHUNK, STEPS = 8, 6, 2
DRAG_S = 0.4
FOLDER = sys.argv[1] if len(sys.argv) > 1 else ""
_END = threading.Event()


def gate(step: str) -> None:
    """Stand here if this step was ordered to."""
    if os.path.exists(os.path.join(FOLDER, "drag")):
        time.sleep(DRAG_S)
    path = os.path.join(FOLDER, "worker.order")
    try:
        with open(path) as file:
            ordered = file.read().strip()
    except OSError:
        return
    if ordered != step:
        return
    os.unlink(path)
    while not os.path.exists(os.path.join(FOLDER, "release")):
        _END.wait(0.01)


class CFMGraphWrapper:
    """Two modes of one estimator: 'captured' shapes are replayed, others run eagerly."""

    def __init__(self, estimator: nn.Module) -> None:
        self.estimator, self.captured = estimator, set()
        self.eager = False

    def _capture(self, key, inputs=None):
        gate("cfm_capture")
        self.captured.add(key)

    def _eager(self, inputs):
        gate("cfm_eager")
        return self.estimator(inputs[0])

    def replay(self, estimator_input, time_emb):
        if self.eager:
            return self._eager((estimator_input, time_emb))
        if estimator_input.shape not in self.captured:
            self._capture(estimator_input.shape)
        gate("cfm_graph")
        return self.estimator(estimator_input)


class HiFTGraphWrapper:
    def __init__(self, hift: nn.Module) -> None:
        self.hift, self.graph = hift, set()

    def _capture(self, *key):
        gate("hift_capture")
        self.graph.add(key)

    def replay(self, speech_feat, cache_source):
        if tuple(speech_feat.shape) not in self.graph:
            self._capture(*speech_feat.shape)
        gate("hift_graph")
        return self.hift(speech_feat)


class BatchedToken2Wav(nn.Module):
    """Encoder, flow matching, vocoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, CHANNELS)
        self.estimator = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)
        self.hift = nn.Conv1d(CHANNELS, 1, 3, padding=1)
        self._cfm_graph_wrapper = CFMGraphWrapper(self.estimator)
        self.hift_graph_wrapper = HiFTGraphWrapper(self.hift)
        self._trt_stepper = None
        self.graphs = True

    def prepare_prompt(self, prompt_cache_id, prompt_wav):
        gate("setup_prompt")
        return torch.zeros(1, CHANNELS)

    def setup_batch(self, features, batch_size):
        gate("setup")
        return [features.clone() for _ in range(batch_size)]

    def _encode_chunk(self, tokens, *, last_chunk):
        gate("encoder")
        return self.embedding(tokens).transpose(1, 2)

    def _estimator_step(self, estimator, *, x, time, valid_lengths=None):
        gate("cfm_ragged" if valid_lengths else "cfm_step")
        if self.graphs and valid_lengths is None:
            return self._cfm_graph_wrapper.replay(x, time)
        return estimator(x)

    def _decode_cfm(self, mu, speakers, *, valid_lengths=None):
        gate("cfm")
        x = torch.zeros_like(mu)
        for step in range(STEPS):
            velocity = self._estimator_step(
                self.estimator, x=x + mu, time=torch.tensor(step), valid_lengths=valid_lengths
            )
            x = x + velocity / STEPS
        return x

    def _stack_flow_cache(self, states):
        gate("cache_stack")
        return torch.cat(states)

    def _split_flow_cache(self, cache, batch_size):
        gate("cache_materialise")
        return [cache[row : row + 1].clone() for row in range(batch_size)]

    def _hift_inference(self, mel, source_cache):
        gate("hift")
        return self.hift_graph_wrapper.replay(mel, source_cache)

    def decode_batch(self, tokens, features, states, *, ragged):
        cache = self._stack_flow_cache(states)
        hidden = self._encode_chunk(tokens, last_chunk=False)
        lengths = [tokens.shape[1]] * len(states) if ragged else None
        mel = self._decode_cfm(hidden, cache, valid_lengths=lengths)
        states = self._split_flow_cache(cache + mel.mean(dim=2), len(states))
        return self._hift_inference(mel, mel[..., :1]), states


class MiniCPMO45Code2Wav(nn.Module):
    """The stage: one call decodes one chunk of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = BatchedToken2Wav()

    def forward(self, input_ids, *, ragged=False):
        gate("code2wav")
        features = self.backend.prepare_prompt("id", "wav")
        states = self.backend.setup_batch(features, input_ids.shape[0])
        audio, _ = self.backend.decode_batch(input_ids, features, states, ragged=ragged)
        return audio


class GPUGenerationModelRunner:
    """What drives the stage, as a worker of vLLM-Omni does."""

    def __init__(self) -> None:
        self.model = MiniCPMO45Code2Wav()
        self.audio: torch.Tensor | None = None

    def execute_model(self, input_ids, *, ragged=False):
        self.audio = self.model(input_ids, ragged=ragged)

    def sample_tokens(self, grammar_output=None):
        gate("output_copy")
        assert self.audio is not None
        return self.audio.detach().to("cpu", copy=True).contiguous()


def publish() -> None:
    """Put the classes where the phase map looks for them."""
    homes = {
        f"{BASE}.batched_token2wav": (BatchedToken2Wav,),
        f"{BASE}.cuda_graph_wrapper": (CFMGraphWrapper, HiFTGraphWrapper),
        f"{BASE}.minicpmo_4_5_code2wav": (MiniCPMO45Code2Wav,),
        "vllm_omni.worker.gpu_generation_model_runner": (GPUGenerationModelRunner,),
    }
    for name, classes in homes.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        for each in classes:
            setattr(module, each.__name__, each)


def chunk(runner: GPUGenerationModelRunner, number: int) -> torch.Tensor:
    """One chunk; every third one ragged, every fifth one without graphs."""
    backend = runner.model.backend
    backend._cfm_graph_wrapper.eager = number % 5 == 0
    runner.execute_model(torch.randint(0, 64, (2, CHUNK)), ragged=number % 3 == 0)
    if number % 7 == 0:  # shapes are captured anew now and then
        backend._cfm_graph_wrapper.captured.clear()
        backend.hift_graph_wrapper.graph.clear()
    return runner.sample_tokens()


def main() -> None:
    from stallwatch_engine.phasemap import Installer, ThreadLanes
    from stallwatch_engine.vllm_plugin import omni_map

    torch.set_num_threads(1)
    torch.manual_seed(0)
    BOARD.lane("setup").close()
    lanes = ThreadLanes(lambda: BOARD)
    publish()
    installer = Installer(lanes)
    installer.install(omni_map.from_environment())
    assert not installer.missing, installer.missing
    lane = lanes.get("main")
    runner = GPUGenerationModelRunner()
    lanes.board.ready()
    with torch.inference_mode():
        number = 0
        while True:
            number += 1
            lane.enter("execute_model", limit=600.0, step=number)
            chunk(runner, number)
            lane.progress(1)
            lane.idle()
            time.sleep(0.002)


if __name__ == "__main__":
    main()
