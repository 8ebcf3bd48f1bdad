"""vLLM's worker on a CPU, with an output head that follows a load of weights.

On a CPU vLLM multiplies packed copies of the weights. A load packs again what the files hold. An output head
that is tied to the embedding is in no file, and would keep the packed weights of the server's start.
"""

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.worker.cpu_worker import CPUWorker


class PackingWorker(CPUWorker):
    """A worker that packs embeddings and output heads after each load of weights."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights as vLLM does, then pack."""
        super().reload_weights(*args, **kwargs)
        for module in self.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)
